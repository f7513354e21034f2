# Sets MINIFLOAT_CUDA (AUTO, ON, OFF) to ON or OFF: CUDA needs sources in src/cuda and an nvcc.
# A CPU build never looks for the toolkit, even where torch's wheel is a CUDA build.

file(GLOB_RECURSE minifloat_cuda_probe CONFIGURE_DEPENDS src/cuda/*.cu)
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

if(MINIFLOAT_CUDA)
  # Hopper, Blackwell (B200), Blackwell Ultra (B300).
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a-real 100a-real 103a-real)
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()

function(minifloat_cuda_options target)
  target_compile_features(${target} PRIVATE cuda_std_20)
  target_compile_definitions(${target} PRIVATE MINIFLOAT_WITH_CUDA)
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false --expt-relaxed-constexpr
                      -Xcompiler=-Wall,-Wextra,-ffp-contract=off>)
endfunction()

# Links the CUDA runtime, which the torch layer calls for device properties, statically, as
# libminifloat does. cuBLASLt, for products, is loaded at its first call (products/cublaslt.cpp).
# So the library loads where there is no GPU and under a torch without CUDA, and uses the cuBLASLt
# that torch has loaded.
function(minifloat_torch_cuda_options target)
  target_compile_definitions(${target} PRIVATE MINIFLOAT_WITH_CUDA)
  target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(${target} PRIVATE CUDA::cudart_static ${CMAKE_DL_LIBS})
  find_path(MINIFLOAT_CUBLASLT_INCLUDE cublasLt.h PATHS ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH)
  if(MINIFLOAT_CUBLASLT_INCLUDE)
    target_compile_definitions(${target} PRIVATE MINIFLOAT_WITH_CUBLASLT)
  else()
    message(STATUS "minifloat: expected cublasLt.h in the CUDA toolkit, found none; exact products "
                   "with tensor scales take two kernels")
  endif()
endfunction()
