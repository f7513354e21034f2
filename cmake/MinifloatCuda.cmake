# Sets MINIFLOAT_CUDA (AUTO, ON, OFF) to ON or OFF: CUDA needs sources in src/cuda and an nvcc.
# A CPU build never looks for the toolkit, even where torch's wheel is a CUDA build.

file(GLOB_RECURSE minifloat_cuda_probe CONFIGURE_DEPENDS src/cuda/*.cu)
# nvcc's host compiler is that of the C++ sources, unless the user names one: nvcc's own default may
# be an older one, which would link its static standard library beside torch's shared one.
if(NOT CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
  set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
endif()
if(MINIFLOAT_CUDA STREQUAL "AUTO")
  set(MINIFLOAT_CUDA OFF)
  if(minifloat_cuda_probe)
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(MINIFLOAT_CUDA ON)
    endif()
  endif()
elseif(MINIFLOAT_CUDA AND NOT minifloat_cuda_probe)
  message(FATAL_ERROR "MINIFLOAT_CUDA=ON: expected CUDA sources src/cuda/*.cu, found none")
endif()

# Every target that has code of its own, and PTX that the driver compiles for all other GPUs. Code of
# 80 runs on 8.0 and 8.6, of 120f on 12.0 and 12.1.
set(minifloat_all_targets 80-real 89-real 90a-real 100a-real 103a-real 120f-real 80-virtual)

# Sets CMAKE_CUDA_ARCHITECTURES, where the caller did not: to ALL's targets for "ALL", else to those
# of this machine's GPUs; without a GPU to Hopper's (H100), Blackwell's (B200) and B300's.
function(minifloat_cuda_targets)
  set(targets ${CMAKE_CUDA_ARCHITECTURES})
  if(targets STREQUAL "ALL")
    set(targets ${minifloat_all_targets})
  elseif(NOT targets)
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE gpus ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" gpus "${gpus}")
    foreach(gpu IN LISTS gpus)
      string(REPLACE "." "" gpu ${gpu})
      if(gpu MATCHES "^(80|86)$")
        list(APPEND targets 80-real)
      elseif(gpu MATCHES "^(90|100|103)$")
        list(APPEND targets ${gpu}a-real)
      elseif(gpu MATCHES "^(120|121)$")
        list(APPEND targets 120f-real)
      elseif(gpu EQUAL 89)
        list(APPEND targets 89-real)
      else()
        list(APPEND targets 80-virtual)
      endif()
    endforeach()
    list(REMOVE_DUPLICATES targets)
    if(NOT targets)
      set(targets 90a-real 100a-real 103a-real)
    endif()
  endif()
  set(CMAKE_CUDA_ARCHITECTURES ${targets} PARENT_SCOPE)
endfunction()

if(MINIFLOAT_CUDA)
  minifloat_cuda_targets()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()

# Definitions that tell of CUDA are given to the sources that read them alone: a build to which CUDA
# is added then compiles no other host code again.
function(minifloat_define definition)
  set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_DEFINITIONS ${definition})
endfunction()

# fmad: whether a * b + c may round once. Casts are the same bytes on every device without it.
function(minifloat_cuda_options target fmad)
  target_compile_features(${target} PRIVATE cuda_std_20)
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--fmad=${fmad} --expt-relaxed-constexpr
                      -Xcompiler=-Wall,-Wextra,-ffp-contract=off>
    # A switch over formats or rules without one of them, as in the C++ sources.
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${MINIFLOAT_WERROR}>>:-Xcompiler=-Werror=switch>)
endfunction()

# Adds the kernels of src/cuda/products, which need CUTLASS's headers: those of the Python package
# nvidia-cutlass, or of -DMINIFLOAT_CUTLASS_INCLUDE=<folder>. They are Hopper's, and compiled for it
# alone. -DMINIFLOAT_CUTLASS_INCLUDE=OFF leaves them out, and torch's grouped products are used.
function(minifloat_cutlass target)
  if(NOT "90a-real" IN_LIST CMAKE_CUDA_ARCHITECTURES AND NOT "90a" IN_LIST CMAKE_CUDA_ARCHITECTURES)
    return()
  endif()
  if("${MINIFLOAT_CUTLASS_INCLUDE}" STREQUAL "OFF")
    message(STATUS "minifloat: no kernels for products of experts; torch's are used")
    return()
  endif()
  set(found "")
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import importlib.util as u; print(u.find_spec('cutlass_library').submodule_search_locations[0])"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  find_path(MINIFLOAT_CUTLASS_INCLUDE cutlass/cutlass.h PATHS "${found}/source/include"
            NO_DEFAULT_PATH)
  if(NOT MINIFLOAT_CUTLASS_INCLUDE)
    message(
      FATAL_ERROR
        "minifloat: expected CUTLASS's headers, which the kernels for products of experts need, "
        "found none. Install them: pip install --no-deps --group cuda. Or set "
        "-DMINIFLOAT_CUTLASS_INCLUDE to their folder, or to OFF: experts' products are then "
        "torch's, which take up to 2.7 times as long (research/measured/experts.md)")
  endif()
  file(GLOB sources CONFIGURE_DEPENDS src/cuda/products/*.cu src/cuda/products/*.cpp)
  add_library(minifloat_products OBJECT ${sources})
  set_target_properties(minifloat_products PROPERTIES CUDA_ARCHITECTURES 90a-real
                                                      POSITION_INDEPENDENT_CODE ON)
  target_include_directories(minifloat_products PRIVATE include src)
  target_include_directories(minifloat_products SYSTEM PRIVATE "${MINIFLOAT_CUTLASS_INCLUDE}"
                                                              ${CUDAToolkit_INCLUDE_DIRS})
  minifloat_library_options(minifloat_products)
  minifloat_cuda_options(minifloat_products true)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:minifloat_products>)
  minifloat_define(MINIFLOAT_WITH_CUTLASS src/grouped_product.cpp)
endfunction()

# Links the CUDA runtime, which the torch layer calls for device properties, statically, as
# libminifloat does. cuBLASLt, for products, is loaded at its first call (products/cublaslt.cpp).
# So the library loads where there is no GPU and under a torch without CUDA, and uses the cuBLASLt
# that torch has loaded.
function(minifloat_torch_cuda_options target)
  minifloat_define(MINIFLOAT_WITH_CUDA ${ARGN})
  foreach(folder IN LISTS CUDAToolkit_INCLUDE_DIRS)
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS "-isystem${folder}")
  endforeach()
  target_link_libraries(${target} PRIVATE $<LINK_ONLY:CUDA::cudart_static> ${CMAKE_DL_LIBS})
  find_path(MINIFLOAT_CUBLASLT_INCLUDE cublasLt.h PATHS ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH)
  if(MINIFLOAT_CUBLASLT_INCLUDE)
    minifloat_define(MINIFLOAT_WITH_CUBLASLT torch/products/cublaslt.cpp)
  else()
    message(STATUS "minifloat: expected cublasLt.h in the CUDA toolkit, found none; exact products "
                   "with tensor scales take two kernels")
  endif()
endfunction()
