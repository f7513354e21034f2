# Finds the host side of libtorch: headers, libtorch_cpu, libc10 and the C++ ABI, by path.
#
# torch's own TorchConfig.cmake, in a CUDA build of torch, requires a CUDA toolkit; a build for the
# CPU must not. So this module asks Python where torch lies (or takes TorchCpu_ROOT: a folder with
# include/ and lib/) and links the libraries by path. libpython is not involved.
#
# In:  TorchCpu_ROOT (optional), Python_EXECUTABLE (optional: the interpreter that imports torch)
# Out: TorchCpu_FOUND, TorchCpu_VERSION, TorchCpu_VERSION_MAJOR_MINOR, target TorchCpu::torch

if(NOT TorchCpu_ROOT)
  if(NOT Python_EXECUTABLE)
    find_package(Python QUIET COMPONENTS Interpreter)
  endif()
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND
        "${Python_EXECUTABLE}" -c
        "import os, torch; print(os.path.dirname(torch.__file__), torch.__version__, int(torch._C._GLIBCXX_USE_CXX11_ABI), sep=';')"
      OUTPUT_VARIABLE _torch_answer OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_VARIABLE _torch_error RESULT_VARIABLE _torch_status)
    if(_torch_status EQUAL 0)
      list(GET _torch_answer -3 _torch_root)
      list(GET _torch_answer -2 TorchCpu_VERSION)
      list(GET _torch_answer -1 _torch_abi)
    else()
      string(STRIP "${_torch_error}" _torch_error)
      string(REGEX REPLACE ".*\n" "" _torch_error "${_torch_error}")
      set(_torch_reason "${Python_EXECUTABLE} cannot import torch: ${_torch_error}")
    endif()
  endif()
else()
  set(_torch_root "${TorchCpu_ROOT}")
endif()

# Not cached: another interpreter, or another torch in the same one, is seen at once.
find_path(TorchCpu_INCLUDE_DIR torch/library.h PATHS "${_torch_root}/include" NO_DEFAULT_PATH
          NO_CACHE)
foreach(_library IN ITEMS torch torch_cpu c10)
  find_library(TorchCpu_${_library}_LIBRARY ${_library} PATHS "${_torch_root}/lib"
               NO_DEFAULT_PATH NO_CACHE)
endforeach()

if(NOT TorchCpu_VERSION AND TorchCpu_INCLUDE_DIR)  # TorchCpu_ROOT was given
  file(STRINGS "${TorchCpu_INCLUDE_DIR}/torch/csrc/api/include/torch/version.h" _torch_lines
       REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX MATCHALL "[0-9]+" _torch_numbers "${_torch_lines}")
  list(JOIN _torch_numbers "." TorchCpu_VERSION)
  set(_torch_abi 1)
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+" TorchCpu_VERSION_MAJOR_MINOR "${TorchCpu_VERSION}")

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  TorchCpu
  REQUIRED_VARS TorchCpu_torch_cpu_LIBRARY TorchCpu_c10_LIBRARY TorchCpu_torch_LIBRARY
                TorchCpu_INCLUDE_DIR
  VERSION_VAR TorchCpu_VERSION
  REASON_FAILURE_MESSAGE "${_torch_reason}")

if(TorchCpu_FOUND AND NOT TARGET TorchCpu::torch)
  add_library(TorchCpu::torch INTERFACE IMPORTED)
  target_include_directories(
    TorchCpu::torch SYSTEM INTERFACE "${TorchCpu_INCLUDE_DIR}"
                                     "${TorchCpu_INCLUDE_DIR}/torch/csrc/api/include")
  target_link_libraries(
    TorchCpu::torch INTERFACE "${TorchCpu_torch_LIBRARY}" "${TorchCpu_torch_cpu_LIBRARY}"
                              "${TorchCpu_c10_LIBRARY}")
  target_compile_definitions(TorchCpu::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${_torch_abi})
endif()
