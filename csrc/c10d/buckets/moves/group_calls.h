// Collectives of buckets, and small facts of a backward pass that ranks tell each other. All ranks
// call them at the same place of their order of calls.
//
// A group's own backend is called without torch's dispatcher, where it is this library's: the way
// there and back takes longer than to reduce a small bucket.
#pragma once

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace dreamcomm {

class DreamBackend;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using TensorList = std::vector<at::Tensor>;

/// The group's backend for a kind of device, where it is this library's; else null.
DreamBackend* own_backend(const c10d::ProcessGroup& group, c10::DeviceType device);

/// Reduces tensors of one device in place, in one call. A sparse tensor is one alone.
WorkPtr all_reduce(const GroupPtr& group, TensorList& tensors, const c10d::ReduceOp& op);
/// `inputs`: of each rank, as large as the output.
WorkPtr reduce_scatter(const GroupPtr& group, const at::Tensor& output, TensorList inputs,
                       const c10d::ReduceOp& op);
/// Every rank's tensor, of one size and type.
TensorList all_gather(const GroupPtr& group, const at::Tensor& mine);
/// The same into given tensors.
WorkPtr all_gather_into(const GroupPtr& group, TensorList all, const at::Tensor& mine);

/// Where numbers are exchanged: the CPU, where the group has a backend for that; else `device`.
c10::Device exchange_device(const c10d::ProcessGroup& group, c10::Device device);
/// Where a flag is set on any rank. On the CPU where the group has a backend for that, so that a
/// GPU is not waited for; else on `device`.
std::vector<bool> set_on_any(const GroupPtr& group, c10::Device device,
                             const std::vector<bool>& flags);

/// Each rank's order, of numbers from 0 to before `width`, each at most once.
std::vector<std::vector<std::int64_t>> orders_of_all(const GroupPtr& group, c10::Device device,
                                                     const std::vector<std::int64_t>& order,
                                                     std::size_t width);

}  // namespace dreamcomm
