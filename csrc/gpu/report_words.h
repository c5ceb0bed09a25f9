// What a kernel that gave up has told, in words.
#pragma once

#include <string>

#include "core/error.h"
#include "gpu/window.h"

namespace dreamcomm::gpu {

/// "all_reduce(SUM, 1024 x float32)"
std::string describe(const CallCard& card);

/// The error that a report stands for, in a group of `size` ranks. All kinds end the group
/// for tensors on GPUs: kernels that were queued behind have not run.
Error error_of(const Report& report, int size);

}  // namespace dreamcomm::gpu
