# Decides whether the .cu files are compiled, and for which GPUs. Must precede every target.
#
# DREAMCOMM_BUILD_CUDA:
#   auto  for the torch and the GPUs of this machine: only where torch is a CUDA build, as
#         another one makes no CUDA tensors, and nvcc is found
#   on    for every GPU, with any torch: for wheels that other machines install
#   off   never
# A CMAKE_CUDA_ARCHITECTURES that is given always wins over the list chosen here.
#
# The C++ tests need no .cu file: they run the kernels' bodies on the host.
# DREAMCOMM_BUILD_GPU_TESTS adds the programs that run them on a GPU.
option(DREAMCOMM_BUILD_GPU_TESTS "Build the tests that need a GPU, too" OFF)
set(DREAMCOMM_BUILD_CUDA "" CACHE STRING
  "Compile the CUDA sources: auto, on or off. Empty: the environment variable of this name, else auto")
# The last one's code also runs on newer GPUs.
set(every_architecture 80-real 90-real 100)

# Sets `result` to the architectures of this machine's GPUs, or to all and `why` to the reason.
function(dreamcomm_cuda_architectures result why)
  set(${result} ${every_architecture} PARENT_SCOPE)
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE answer ERROR_QUIET RESULT_VARIABLE status)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]" cards "${answer}")
  if(NOT status EQUAL 0 OR NOT cards)
    set(${why} "nvidia-smi shows no GPU here" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code OUTPUT_VARIABLE known ERROR_QUIET)
  list(REMOVE_DUPLICATES cards)
  foreach(card IN LISTS cards)
    string(REPLACE "." "" number "${card}")
    if(number LESS 80 OR NOT "${known}" MATCHES "sm_${number}[^0-9]")
      set(${why} "nvcc or the kernels do not know this machine's GPU of compute capability ${card}"
        PARENT_SCOPE)
      return()
    endif()
    list(APPEND found ${number}-real)
  endforeach()
  set(${result} ${found} PARENT_SCOPE)
  set(${why} "this machine's GPUs" PARENT_SCOPE)
endfunction()

set(DREAMCOMM_CUDA OFF) # the decision
set(DREAMCOMM_CUDA_WHY_NOT "the C++ tests need none of it")
if(NOT DREAMCOMM_BUILD_TESTS OR DREAMCOMM_BUILD_GPU_TESTS)
  set(wanted "${DREAMCOMM_BUILD_CUDA}")
  if(wanted STREQUAL "")
    set(wanted "$ENV{DREAMCOMM_BUILD_CUDA}")
  endif()
  if(wanted STREQUAL "")
    set(wanted auto)
  endif()
  string(TOLOWER "${wanted}" wanted)
  if(NOT wanted MATCHES "^(auto|on|off)$")
    dreamcomm_stop("DREAMCOMM_BUILD_CUDA must be auto, on or off; got ${wanted}.")
  endif()
  if(DREAMCOMM_BUILD_GPU_TESTS AND wanted STREQUAL "auto") # these know no torch
    set(wanted on)
  endif()

  if(wanted STREQUAL "off")
    set(DREAMCOMM_CUDA_WHY_NOT "DREAMCOMM_BUILD_CUDA is off")
  elseif(wanted STREQUAL "auto" AND NOT TORCH_CUDA_VERSION)
    set(DREAMCOMM_CUDA_WHY_NOT "torch ${TORCH_VERSION} has no CUDA")
  else()
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(DREAMCOMM_CUDA ON)
      set(DREAMCOMM_CUDA_WHY_NOT "")
    elseif(wanted STREQUAL "on")
      dreamcomm_stop("DREAMCOMM_BUILD_CUDA=on and DREAMCOMM_BUILD_GPU_TESTS need nvcc on PATH, or CMAKE_CUDA_COMPILER.")
    else()
      set(DREAMCOMM_CUDA_WHY_NOT "no nvcc was found")
    endif()
  endif()
endif()

if(DREAMCOMM_CUDA)
  set(why "CMAKE_CUDA_ARCHITECTURES")
  if(NOT CMAKE_CUDA_ARCHITECTURES AND wanted STREQUAL "auto")
    dreamcomm_cuda_architectures(CMAKE_CUDA_ARCHITECTURES why)
  elseif(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES ${every_architecture})
    set(why "DREAMCOMM_BUILD_CUDA is on")
  endif()
  message(STATUS "Building with CUDA for ${CMAKE_CUDA_ARCHITECTURES}: ${why}")
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
  # The static runtime: the module then imports without a driver.
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
else()
  message(STATUS "Building without CUDA: ${DREAMCOMM_CUDA_WHY_NOT}")
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
