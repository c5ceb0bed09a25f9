# Written by CMake beside the compiled module.
TORCH_VERSION: str  # of the build, such as "2.13.0+cpu"
CUDA_VERSION: str  # of nvcc, such as "13.0"; empty: built without CUDA
