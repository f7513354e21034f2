# C++ micro-benchmarks: benchmarks/**/*_bench.cpp, one executable a file, run by `bench_all`.

find_package(benchmark QUIET)
if(NOT benchmark_FOUND)
  message(FATAL_ERROR "MINIFLOAT_BENCHMARKS=ON needs Google Benchmark: expected its CMake package, "
                      "found none (Debian and Ubuntu: apt install libbenchmark-dev)")
endif()

add_custom_target(bench_all)
file(GLOB_RECURSE bench_sources CONFIGURE_DEPENDS
     "${PROJECT_SOURCE_DIR}/benchmarks/*_bench.cpp")
foreach(source IN LISTS bench_sources)
  get_filename_component(name "${source}" NAME_WE)
  add_executable(${name} "${source}")
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/benchmarks")
  target_link_libraries(${name} PRIVATE minifloat benchmark::benchmark_main)
  minifloat_compile_options(${name})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY
                                           "${PROJECT_BINARY_DIR}/benchmarks")
  add_custom_target(bench_${name} COMMAND ${name} USES_TERMINAL)
  add_dependencies(bench_all bench_${name})
endforeach()
