# Settles MINIFLOAT_CUDA (AUTO, ON, OFF) to ON or OFF: CUDA needs sources in src/cuda and an nvcc.
# A CPU build never looks at the toolkit, even where torch's wheel is a CUDA build.

file(GLOB minifloat_cuda_probe CONFIGURE_DEPENDS src/cuda/*.cu)
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
endif()

function(minifloat_cuda_options target)
  target_compile_features(${target} PRIVATE cuda_std_20)
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false --expt-relaxed-constexpr
                      -Xcompiler=-Wall,-Wextra,-ffp-contract=off>)
endfunction()
