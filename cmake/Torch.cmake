# Sets TORCH_DIR and TORCH_VERSION and makes the targets `torch`, the installed torch's headers and
# the two libraries that a backend needs, and `torch_python` with a third one. find_package(Torch) is not used: it
# fails with a CUDA torch where the CUDA toolkit is missing or partial. Sets TORCH_CUDA_VERSION,
# too: empty with a torch that has no CUDA.
find_package(Python 3.10 COMPONENTS Interpreter Development.Module)
if(NOT Python_Development.Module_FOUND)
  dreamcomm_stop("dreamcomm needs Python 3.10 or newer with its C headers: install the package python3-dev (or python3-devel).")
endif()

set(TORCH_DIR "${DREAMCOMM_TORCH_DIR}")
if(NOT TORCH_DIR)
  set(TORCH_DIR "$ENV{DREAMCOMM_TORCH_DIR}")
endif()
if(NOT TORCH_DIR)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/find_torch.py"
    OUTPUT_VARIABLE TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endif()

set(remedy "install it first (pip install 'torch>=2.11,<2.15'); if it is installed (uv hides it from builds), set DREAMCOMM_TORCH_DIR to its folder")
if(NOT TORCH_DIR)
  dreamcomm_stop("dreamcomm compiles against the installed torch, and ${Python_EXECUTABLE} has none: ${remedy}.")
endif()
if(NOT EXISTS "${TORCH_DIR}/version.py" OR NOT EXISTS "${TORCH_DIR}/lib/libtorch_python.so")
  dreamcomm_stop("dreamcomm compiles against the installed torch, and ${TORCH_DIR} holds none: ${remedy}.")
endif()

file(STRINGS "${TORCH_DIR}/version.py" line REGEX "^__version__ = ")
string(REGEX REPLACE "^__version__ = '([^']+)'.*" "\\1" TORCH_VERSION "${line}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${TORCH_VERSION}")
if(minor VERSION_LESS 2.11 OR minor VERSION_GREATER 2.14)
  dreamcomm_stop("dreamcomm needs torch 2.11 to 2.14, and ${TORCH_DIR} holds ${TORCH_VERSION}: pip install 'torch>=2.11,<2.15'.")
endif()
file(STRINGS "${TORCH_DIR}/version.py" line REGEX "^cuda[ :].*= '")
string(REGEX REPLACE ".*= '([^']+)'.*" "\\1" TORCH_CUDA_VERSION "${line}")
message(STATUS "Building against torch ${TORCH_VERSION} in ${TORCH_DIR}")

add_library(torch INTERFACE)
target_include_directories(torch SYSTEM INTERFACE "${TORCH_DIR}/include")
target_link_libraries(torch INTERFACE
  "${TORCH_DIR}/lib/libc10.so" "${TORCH_DIR}/lib/libtorch_cpu.so")
# Another torch in the same folder compiles anew, whatever its headers' dates.
target_compile_definitions(torch INTERFACE "DREAMCOMM_TORCH_VERSION=\"${TORCH_VERSION}\"")
add_library(torch_python INTERFACE)
target_link_libraries(torch_python INTERFACE torch "${TORCH_DIR}/lib/libtorch_python.so")
