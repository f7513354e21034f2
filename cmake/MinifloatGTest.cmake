# GoogleTest as the target minifloat_gtest_main: the system's, or else built from the sources that
# the PyPI wheel `ros-gtest-vendor` contains (a machine with Python and pip needs nothing more).

add_library(minifloat_gtest_main INTERFACE)
find_package(GTest QUIET)
if(GTest_FOUND)
  target_link_libraries(minifloat_gtest_main INTERFACE GTest::gtest_main)
else()
  if(NOT Python_EXECUTABLE)
    find_package(Python REQUIRED COMPONENTS Interpreter)
  endif()
  set(gtest_root "${PROJECT_BINARY_DIR}/gtest")
  if(NOT EXISTS "${gtest_root}/src/gtest-all.cc")
    execute_process(COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/tools/fetch_gtest.py"
                            "${gtest_root}" COMMAND_ERROR_IS_FATAL ANY)
  endif()
  add_library(minifloat_gtest STATIC EXCLUDE_FROM_ALL "${gtest_root}/src/gtest-all.cc"
                                                      "${gtest_root}/src/gtest_main.cc")
  target_compile_features(minifloat_gtest PUBLIC cxx_std_20)
  target_include_directories(minifloat_gtest SYSTEM PUBLIC "${gtest_root}/include"
                             PRIVATE "${gtest_root}")
  target_link_libraries(minifloat_gtest PUBLIC Threads::Threads)
  target_link_libraries(minifloat_gtest_main INTERFACE minifloat_gtest)
endif()
