# The compiler flags of every target of this build, and the reason for each.

if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(MINIFLOAT_CCACHE ccache HINTS "${PROJECT_SOURCE_DIR}/.venv/bin")
  if(MINIFLOAT_CCACHE)
    # The two settings with which ccache caches units that use a precompiled header.
    set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
                                    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime
                                    ${MINIFLOAT_CCACHE})
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${MINIFLOAT_CCACHE})
    add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
  endif()
endif()

set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

function(minifloat_compile_options target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_compile_options(
    ${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -ffp-contract=off>
    # Neither changes a value: they drop errno and the IEEE exception flags, which no code here
    # reads, and allow the compiler to vectorise conversions and selects.
    $<$<COMPILE_LANGUAGE:CXX>:-fno-math-errno -fno-trapping-math>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC 12 reports an overlap, or an overflow, inside its own std::string operator+ (GCC bug
    # 105651); which of them depends on the files of a batch.
    target_compile_options(
      ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict -Wno-stringop-overflow>)
  endif()
  if(MINIFLOAT_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
      # GCC 13.3 warns of an access past an array in torch/layers/grouped_mm.cpp, where none is.
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-error=array-bounds>)
    endif()
  endif()
  if(MINIFLOAT_SANITIZE)
    set(flags -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${flags}>)
    target_link_options(${target} PRIVATE ${flags})
  endif()
endfunction()

# Lets the two shared libraries find each other by folder, in the tree or installed.
function(minifloat_library_options target)
  minifloat_compile_options(${target})
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN" BUILD_WITH_INSTALL_RPATH ON)
  if(NOT MINIFLOAT_SANITIZE)  # the executable links a sanitizer's run-time library
    target_link_options(${target} PRIVATE LINKER:--no-undefined)
  endif()
  if(MINIFLOAT_IN_TREE)
    set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY
                                               "${PROJECT_SOURCE_DIR}/python/minifloat/lib")
  endif()
endfunction()
