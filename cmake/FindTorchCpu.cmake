# Finds the host side of libtorch: headers, libtorch_cpu, libc10 and the C++ ABI, by path.
#
# torch's own TorchConfig.cmake, in a CUDA build of torch, requires a CUDA toolkit; a build for the
# CPU must not. So this module finds torch's folder, the one with include/, lib/ and share/cmake/,
# and links the libraries by path. libpython is not involved. The first of these that is given
# decides:
#
#   Torch_ROOT, Torch_DIR      libtorch's folder, or its share/cmake/Torch; variables or environment
#   -DPython_EXECUTABLE        the torch that this interpreter imports
#   CMAKE_PREFIX_PATH          where it has libtorch's folder, or torch.utils.cmake_prefix_path
#   Python_EXECUTABLE          as find_package(Python) sets it; without it, the Python that CMake
#                              finds
#
# Out: TorchCpu_FOUND, TorchCpu_VERSION, TorchCpu_VERSION_MAJOR_MINOR, target TorchCpu::torch, or
#      TorchCpu_REASON

set(_torch_root "")
set(TorchCpu_REASON "")
set(_torch_hints ${Torch_ROOT} $ENV{Torch_ROOT} ${Torch_DIR} $ENV{Torch_DIR})
list(FILTER _torch_hints EXCLUDE REGEX "-NOTFOUND$")  # of an earlier find_package(Torch)
set(_torch_is_given ${_torch_hints})
if(NOT _torch_hints AND NOT DEFINED CACHE{Python_EXECUTABLE})
  set(_torch_hints ${CMAKE_PREFIX_PATH} ENV CMAKE_PREFIX_PATH)
endif()
unset(_torch_config)
unset(_torch_root_path)
find_path(_torch_config TorchConfig.cmake HINTS ${_torch_hints}
          PATH_SUFFIXES share/cmake/Torch Torch NO_DEFAULT_PATH NO_CACHE CMAKE_FIND_ROOT_PATH_BOTH)
if(_torch_config)
  # Whoever cross-compiles names the target's torch, wherever on this machine it is.
  set(_torch_root_path NO_CMAKE_FIND_ROOT_PATH)
  get_filename_component(_torch_root "${_torch_config}/../../.." ABSOLUTE)
elseif(_torch_is_given)
  list(JOIN _torch_is_given ", " _torch_is_given)
  string(CONCAT TorchCpu_REASON "expected share/cmake/Torch/TorchConfig.cmake of libtorch in "
                                "Torch_ROOT or Torch_DIR, found none in ${_torch_is_given}")
else()
  if(NOT Python_EXECUTABLE)
    find_package(Python QUIET COMPONENTS Interpreter)
  endif()
  set(TorchCpu_REASON "no torch in CMAKE_PREFIX_PATH, and no Python")
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "import os, torch; print(os.path.dirname(torch.__file__))"
      OUTPUT_VARIABLE _torch_answer OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_VARIABLE _torch_error RESULT_VARIABLE _torch_status)
    if(_torch_status EQUAL 0)
      string(REGEX REPLACE ".*\n" "" _torch_root "${_torch_answer}")
    else()
      string(STRIP "${_torch_error}" _torch_error)
      string(REGEX REPLACE ".*\n" "" _torch_error "${_torch_error}")
      set(TorchCpu_REASON "${Python_EXECUTABLE} cannot import torch: ${_torch_error}")
    endif()
  endif()
  string(APPEND TorchCpu_REASON
         ". Set Torch_ROOT to libtorch's folder, or Python_EXECUTABLE to a Python with torch")
  string(REPLACE ";" "," TorchCpu_REASON "${TorchCpu_REASON}")  # else CMake splits it
endif()

# Not cached: another interpreter, or another torch in the same one, is seen at once.
unset(TorchCpu_INCLUDE_DIR)
find_path(TorchCpu_INCLUDE_DIR torch/library.h PATHS "${_torch_root}/include" NO_DEFAULT_PATH
          NO_CACHE ${_torch_root_path})
foreach(_library IN ITEMS torch torch_cpu c10)
  unset(TorchCpu_${_library}_LIBRARY)
  find_library(TorchCpu_${_library}_LIBRARY ${_library} PATHS "${_torch_root}/lib"
               NO_DEFAULT_PATH NO_CACHE ${_torch_root_path})
endforeach()

if(TorchCpu_INCLUDE_DIR)
  set(_torch_header "${TorchCpu_INCLUDE_DIR}/torch/headeronly/version.h")
  if(NOT EXISTS "${_torch_header}")  # older than any that is supported, but an error names it
    set(_torch_header "${TorchCpu_INCLUDE_DIR}/torch/csrc/api/include/torch/version.h")
  endif()
  file(STRINGS "${_torch_header}" _torch_lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX MATCHALL "[0-9]+" _torch_numbers "${_torch_lines}")
  list(JOIN _torch_numbers "." TorchCpu_VERSION)
elseif(_torch_root)
  set(TorchCpu_REASON "no include/torch/library.h in ${_torch_root}")
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+" TorchCpu_VERSION_MAJOR_MINOR "${TorchCpu_VERSION}")

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  TorchCpu
  REQUIRED_VARS TorchCpu_torch_cpu_LIBRARY TorchCpu_c10_LIBRARY TorchCpu_torch_LIBRARY
                TorchCpu_INCLUDE_DIR
  VERSION_VAR TorchCpu_VERSION
  REASON_FAILURE_MESSAGE "${TorchCpu_REASON}")

if(TorchCpu_FOUND AND NOT TARGET TorchCpu::torch)
  add_library(TorchCpu::torch INTERFACE IMPORTED)
  target_include_directories(
    TorchCpu::torch SYSTEM INTERFACE "${TorchCpu_INCLUDE_DIR}"
                                     "${TorchCpu_INCLUDE_DIR}/torch/csrc/api/include")
  target_link_libraries(
    TorchCpu::torch INTERFACE "${TorchCpu_torch_LIBRARY}" "${TorchCpu_torch_cpu_LIBRARY}"
                              "${TorchCpu_c10_LIBRARY}")
  target_compile_definitions(TorchCpu::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=1)
endif()
