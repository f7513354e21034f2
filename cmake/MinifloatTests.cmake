# Tests mirror the sources: tests/core/format_test.cpp tests core/format.h and becomes the
# executable core_format_test, whose cases ctest names core.<Suite>.<Case>.
#
# tests/**/exhaustive_*.cpp walk a whole 2^32 space: built and run by the target `exhaustive` only.

include(MinifloatGTest)
include(GoogleTest)

# minifloat_add_test(<folder> <source> <libraries>...): one executable a file.
function(minifloat_add_test folder source)
  get_filename_component(stem "${source}" NAME_WE)
  set(name "${stem}")
  set(prefix "minifloat.")
  if(folder)
    set(name "${folder}_${stem}")
    set(prefix "${folder}.")
  endif()
  add_executable(${name} "${source}")
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests"
                                             "${PROJECT_SOURCE_DIR}/src"
                                             "${PROJECT_SOURCE_DIR}/torch")
  target_link_libraries(${name} PRIVATE ${ARGN} minifloat_gtest_main)
  minifloat_compile_options(${name})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  if(stem MATCHES "^exhaustive_")
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    set_property(GLOBAL APPEND PROPERTY MINIFLOAT_EXHAUSTIVE ${name})
  else()
    gtest_discover_tests(${name} TEST_PREFIX "${prefix}" DISCOVERY_MODE PRE_TEST NO_PRETTY_TYPES
                         PROPERTIES TIMEOUT 900)
  endif()
endfunction()

# Headers alone, for tests of core/ before or without the library.
add_library(minifloat_core INTERFACE)
target_include_directories(minifloat_core INTERFACE "${PROJECT_SOURCE_DIR}/include")
target_link_libraries(minifloat_core INTERFACE Threads::Threads)

function(minifloat_add_folder folder)
  file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/${folder}/*_test.cpp"
       "${PROJECT_SOURCE_DIR}/tests/${folder}/exhaustive_*.cpp")
  list(REMOVE_DUPLICATES sources)
  foreach(source IN LISTS sources)
    minifloat_add_test("${folder}" "${source}" ${ARGN})
  endforeach()
endfunction()

minifloat_add_folder(core minifloat_core)
if(TARGET minifloat)
  minifloat_add_folder("" minifloat)
  if(MINIFLOAT_CUDA)  # a build without CUDA refuses a CUDA tensor
    target_compile_definitions(dispatch_test PRIVATE MINIFLOAT_WITH_CUDA)
  endif()
  minifloat_add_folder(cpu minifloat)
  # Hostile calls of every function: fuzz_api [calls] [seed].
  file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/fuzz/*.cpp")
  add_executable(fuzz_api ${sources})
  target_include_directories(fuzz_api PRIVATE "${PROJECT_SOURCE_DIR}/tests")
  target_link_libraries(fuzz_api PRIVATE minifloat)
  minifloat_compile_options(fuzz_api)
  set_target_properties(fuzz_api PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  add_test(NAME minifloat.fuzz_api COMMAND fuzz_api 20000)
endif()
if(TARGET minifloat_torch)
  minifloat_add_folder(torch minifloat_torch)
endif()

# The tests of the installed package as a user builds with it: install, build examples/, run them.
file(GLOB examples CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/examples/*.cpp")
if(TARGET minifloat_torch AND examples)
  set(stage "${PROJECT_BINARY_DIR}/stage")
  add_test(NAME package.install COMMAND "${CMAKE_COMMAND}" --install "${PROJECT_BINARY_DIR}"
                                        --prefix "${stage}")
  set_tests_properties(package.install PROPERTIES FIXTURES_SETUP package)
  add_test(NAME package.without_torch
           COMMAND "${CMAKE_COMMAND}" -S "${PROJECT_SOURCE_DIR}/examples" -B
                   "${PROJECT_BINARY_DIR}/examples-without-torch" -G "${CMAKE_GENERATOR}"
                   "-DCMAKE_PREFIX_PATH=${stage}" "-DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}"
                   "-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}" -DTorch_ROOT=/nowhere)
  set_tests_properties(
    package.without_torch
    PROPERTIES FIXTURES_REQUIRED package
               PASS_REGULAR_EXPRESSION "component torch: expected share/cmake/Torch/TorchConfig"
               FAIL_REGULAR_EXPRESSION "target was not found")
  add_test(
    NAME package.example
    COMMAND
      "${CMAKE_CTEST_COMMAND}" --build-and-test "${PROJECT_SOURCE_DIR}/examples"
      "${PROJECT_BINARY_DIR}/examples" --build-generator "${CMAKE_GENERATOR}" --build-options
      "-DCMAKE_BUILD_TYPE=${CMAKE_BUILD_TYPE}" "-DCMAKE_PREFIX_PATH=${stage}"
      "-DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}" "-DPython_EXECUTABLE=${Python_EXECUTABLE}"
      "-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}" --test-command
      "${PROJECT_BINARY_DIR}/examples/train")
  set_tests_properties(package.example PROPERTIES FIXTURES_REQUIRED package FIXTURES_SETUP examples
                                                  TIMEOUT 900)
  foreach(example cast cast_tensor experts layer)
    add_test(NAME package.${example} COMMAND "${PROJECT_BINARY_DIR}/examples/${example}")
    set_tests_properties(package.${example} PROPERTIES FIXTURES_REQUIRED examples TIMEOUT 300)
  endforeach()
endif()

get_property(minifloat_exhaustive GLOBAL PROPERTY MINIFLOAT_EXHAUSTIVE)
if(minifloat_exhaustive)
  set(commands)
  foreach(name IN LISTS minifloat_exhaustive)
    list(APPEND commands COMMAND ${name})
  endforeach()
  add_custom_target(exhaustive ${commands} USES_TERMINAL
                    COMMENT "The exhaustive tests: every float, minutes each")
endif()
