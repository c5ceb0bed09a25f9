# Compiles the floors' .cu files where nvcc is at hand. Must precede every target. The C++
# tests need none of it: they run the kernels' bodies on the host. DREAMCOMM_BUILD_GPU_TESTS
# adds the program that runs them on a GPU.
option(DREAMCOMM_BUILD_GPU_TESTS "Build the tests that need a GPU, too" OFF)
set(DREAMCOMM_CUDA OFF)
if(NOT DREAMCOMM_BUILD_TESTS OR DREAMCOMM_BUILD_GPU_TESTS)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      # The code of the last one runs on what comes after it, too.
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
    endif()
    set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
    # The static runtime: the module then imports without a driver.
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    enable_language(CUDA)
    set(DREAMCOMM_CUDA ON)
  else()
    message(STATUS "No nvcc found: building without CUDA")
  endif()
endif()

# CUDA code of a target: as strict as the C++ around it, no fused multiply-add where the
# source has two operations, and beside each object a file with its kernels' registers.
function(dreamcomm_cuda_options target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-O3 -fmad=false --expt-relaxed-constexpr -Xptxas=-v -Xcompiler=-Wall>)
  if(DREAMCOMM_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
  endif()
  set_target_properties(${target} PROPERTIES
    CUDA_COMPILER_LAUNCHER "${PROJECT_SOURCE_DIR}/cmake/keep_ptxas_report.sh")
endfunction()
