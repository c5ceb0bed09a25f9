#include "c10d/buckets/moves/group_calls.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "c10d/backend/backend.h"

namespace dreamcomm {
namespace {

bool has_device(const c10d::ProcessGroup& group, c10::DeviceType device) {
  const auto types = group.getDeviceTypes();
  return std::find(types.begin(), types.end(), device) != types.end();
}

/// Calls `call` on the group's own backend, or on the group.
template <typename Call>
WorkPtr by_shortest_way(const GroupPtr& group, const at::Tensor& tensor, Call&& call) {
  DreamBackend* const own = own_backend(*group, tensor.device().type());
  return own != nullptr && !tensor.is_sparse() ? call(*own) : call(*group);
}

}  // namespace

c10::Device exchange_device(const c10d::ProcessGroup& group, c10::Device device) {
  return has_device(group, c10::DeviceType::CPU) ? c10::Device(c10::DeviceType::CPU) : device;
}

DreamBackend* own_backend(const c10d::ProcessGroup& group, c10::DeviceType device) {
  // Another class may stand before the backends, and see the calls.
  if (typeid(group) != typeid(c10d::ProcessGroup) || !has_device(group, device)) return nullptr;
  return dynamic_cast<DreamBackend*>(
      const_cast<c10d::ProcessGroup&>(group).getBackend(device).get());
}

WorkPtr all_reduce(const GroupPtr& group, TensorList& tensors, const c10d::ReduceOp& op) {
  return by_shortest_way(group, tensors.front(), [&](auto& to) {
    if (tensors.size() == 1) {
      c10d::AllreduceOptions opts;
      opts.reduceOp = op;
      opts.asyncOp = true;
      return to.allreduce(tensors, opts);
    }
    c10d::AllreduceCoalescedOptions opts;
    opts.reduceOp = op;
    opts.asyncOp = true;
    return to.allreduce_coalesced(tensors, opts);
  });
}

WorkPtr reduce_scatter(const GroupPtr& group, const at::Tensor& output, TensorList inputs,
                       const c10d::ReduceOp& op) {
  c10d::ReduceScatterOptions opts;
  opts.reduceOp = op;
  opts.asyncOp = true;
  // As lists: torch 2.13 and those before have no other call in common.
  TensorList outputs{output};
  std::vector<TensorList> every{std::move(inputs)};
  return by_shortest_way(group, output,
                         [&](auto& to) { return to.reduce_scatter(outputs, every, opts); });
}

TensorList all_gather(const GroupPtr& group, const at::Tensor& mine) {
  std::vector<TensorList> every(1);
  for (int rank = 0; rank < group->getSize(); ++rank) every[0].push_back(at::empty_like(mine));
  TensorList inputs{mine};
  c10d::AllgatherOptions opts;
  opts.asyncOp = true;
  by_shortest_way(group, mine, [&](auto& to) { return to.allgather(every, inputs, opts); })->wait();
  return std::move(every[0]);
}

WorkPtr all_gather_into(const GroupPtr& group, TensorList all, const at::Tensor& mine) {
  c10d::AllgatherOptions opts;
  opts.asyncOp = true;
  TensorList inputs{mine};
  std::vector<TensorList> every{std::move(all)};
  return by_shortest_way(group, mine, [&](auto& to) { return to.allgather(every, inputs, opts); });
}

std::vector<bool> set_on_any(const GroupPtr& group, c10::Device device,
                             const std::vector<bool>& flags) {
  const auto count = static_cast<std::int64_t>(flags.size());
  const at::Tensor mine = at::zeros({count}, at::TensorOptions().dtype(at::kByte));
  std::copy(flags.begin(), flags.end(), mine.mutable_data_ptr<std::uint8_t>());
  TensorList moved{mine.to(exchange_device(*group, device))};
  all_reduce(group, moved, c10d::ReduceOp::MAX)->wait();
  const at::Tensor found = moved[0].cpu();
  const auto* const any = found.const_data_ptr<std::uint8_t>();
  return std::vector<bool>(any, any + count);
}

std::vector<std::vector<std::int64_t>> orders_of_all(const GroupPtr& group, c10::Device device,
                                                     const std::vector<std::int64_t>& order,
                                                     std::size_t width) {
  const auto count = static_cast<std::int64_t>(width);
  const at::Tensor mine = at::full({count}, -1, at::TensorOptions().dtype(at::kLong));
  std::copy(order.begin(), order.end(), mine.mutable_data_ptr<std::int64_t>());
  std::vector<std::vector<std::int64_t>> orders;
  for (const at::Tensor& one : all_gather(group, mine.to(exchange_device(*group, device)))) {
    const at::Tensor found = one.cpu();
    const auto* const row = found.const_data_ptr<std::int64_t>();
    orders.emplace_back(row, std::find(row, row + count, -1));
  }
  return orders;
}

}  // namespace dreamcomm
