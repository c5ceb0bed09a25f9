// Small facts of a backward pass that ranks tell each other. Collective: all ranks call them at the
// same place of their order of calls.
#pragma once

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace dreamcomm {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Where a flag is set on any rank. On the CPU where the group has a backend for that, so that a
/// GPU is not waited for; else on `device`.
std::vector<bool> set_on_any(const GroupPtr& group, c10::Device device,
                             const std::vector<bool>& flags);

/// Each rank's order, of numbers from 0 to before `width`, each at most once.
std::vector<std::vector<std::int64_t>> orders_of_all(const GroupPtr& group, c10::Device device,
                                                     const std::vector<std::int64_t>& order,
                                                     std::size_t width);

}  // namespace dreamcomm
