// The CUDA device of a thread, for tests that see no CUDA header.
#pragma once

namespace dreamcomm::testing {

/// Makes a device the current one of this thread.
void use_device(int device);

}  // namespace dreamcomm::testing
