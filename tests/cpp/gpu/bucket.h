// Pack and unpack by the GPU's kernels: on the host target, or, in a build with
// DREAMCOMM_BUILD_GPU_TESTS, on a GPU.
#pragma once

#include "kernels/bucket.h"

namespace dreamcomm::testing {

struct Grid {
  int blocks = 1;
  int lanes = 1;
  /// Any number of tensors by one kernel, whose table lies in memory of the device.
  bool listed = false;
};

/// Jobs on memory of the host; they return when all is done. The bytes moved are counted
/// on the host target, and those of the formula on a GPU, where the grid is the library's.
Moved pack_on_gpu(const PackJob& job, const Grid& grid);
Unpacked unpack_on_gpu(const UnpackJob& job, const Grid& grid);

}  // namespace dreamcomm::testing
