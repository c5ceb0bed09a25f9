# Written by CMake beside the compiled module.
TORCH_VERSION: str  # of the build, such as "2.13.0+cpu"
CUDA_VERSION: str  # of nvcc, such as "13.0"; empty: built without CUDA
CUDA_ARCHITECTURES: str  # that the kernels are compiled for, such as "80-real, 90-real, 100"
WITHOUT_CUDA: str  # why the build has no CUDA, such as "no nvcc was found"; empty: it has
