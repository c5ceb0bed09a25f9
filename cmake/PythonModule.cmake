# The module dreamcomm._C: the one room that sees Python.
file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/c10d/python/*.cc")
Python_add_library(_C MODULE WITH_SOABI ${sources})
# pybind11 comes with torch: classes cannot be shared with torch's over another version.
target_link_libraries(_C PRIVATE dc_c10d torch_python)
dreamcomm_compile_options(_C -O2)
# Beside torch in the environment; torch, loaded first, has these libraries open anyway.
set_target_properties(_C PROPERTIES
  BUILD_WITH_INSTALL_RPATH ON
  INSTALL_RPATH "$ORIGIN/../torch/lib")

set(cuda_version "")
set(cuda_architectures "")
if(DREAMCOMM_CUDA)
  list(JOIN CMAKE_CUDA_ARCHITECTURES ", " cuda_architectures)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" cuda_version "${CMAKE_CUDA_COMPILER_VERSION}")
  # The static CUDA runtime stays this module's own, beside the one that torch may load.
  target_link_options(_C PRIVATE -Wl,--exclude-libs,ALL)
endif()
file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/_build_info.py"
  CONTENT "\"\"\"What the compiled module was built with.\"\"\"\n\nTORCH_VERSION = \"@TORCH_VERSION@\"\nCUDA_VERSION = \"@cuda_version@\"  # of nvcc; empty: without CUDA\nCUDA_ARCHITECTURES = \"@cuda_architectures@\"\nWITHOUT_CUDA = \"@DREAMCOMM_CUDA_WHY_NOT@\"\n" @ONLY)
install(TARGETS _C LIBRARY DESTINATION dreamcomm)
install(FILES "${PROJECT_BINARY_DIR}/_build_info.py" DESTINATION dreamcomm)

# An accelerator made of threads, beside the package: for tests of what is done with tensors
# on GPUs, on machines without one.
option(DREAMCOMM_TEST_DEVICE "Build the tests' accelerator, too" OFF)
if(DREAMCOMM_TEST_DEVICE)
  set(tests "${PROJECT_SOURCE_DIR}/tests")
  file(GLOB sources CONFIGURE_DEPENDS "${tests}/device/*.cc")
  list(APPEND sources "${tests}/cpp/support/host_driver.cc" "${tests}/cpp/support/host_kernel.cc"
    "${tests}/cpp/support/ranks.cc")
  Python_add_library(dreamcomm_test_device MODULE WITH_SOABI ${sources})
  target_include_directories(dreamcomm_test_device PRIVATE "${tests}" "${tests}/device")
  target_link_libraries(dreamcomm_test_device PRIVATE dc_c10d torch_python)
  dreamcomm_compile_options(dreamcomm_test_device -O2)
  set_target_properties(dreamcomm_test_device PROPERTIES UNITY_BUILD OFF)
  set_target_properties(dreamcomm_test_device PROPERTIES
    BUILD_WITH_INSTALL_RPATH ON
    INSTALL_RPATH "$ORIGIN/torch/lib")
  install(TARGETS dreamcomm_test_device LIBRARY DESTINATION .)
endif()
