#include "c10d/gradients/rank_exchange.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace dreamcomm {
namespace {

c10::Device exchange_device(const c10d::ProcessGroup& group, c10::Device device) {
  const auto types = group.getDeviceTypes();
  const bool on_cpu = std::find(types.begin(), types.end(), c10::DeviceType::CPU) != types.end();
  return on_cpu ? c10::Device(c10::DeviceType::CPU) : device;
}

}  // namespace

std::vector<bool> set_on_any(const GroupPtr& group, c10::Device device,
                             const std::vector<bool>& flags) {
  const auto count = static_cast<std::int64_t>(flags.size());
  const at::Tensor mine = at::zeros({count}, at::TensorOptions().dtype(at::kByte));
  std::copy(flags.begin(), flags.end(), mine.mutable_data_ptr<std::uint8_t>());
  std::vector<at::Tensor> moved{mine.to(exchange_device(*group, device))};
  c10d::AllreduceOptions opts;
  opts.reduceOp = c10d::ReduceOp::MAX;
  opts.asyncOp = true;
  group->allreduce(moved, opts)->wait();
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
  std::vector<at::Tensor> inputs{mine.to(exchange_device(*group, device))};
  std::vector<std::vector<at::Tensor>> all(1);
  for (int rank = 0; rank < group->getSize(); ++rank) all[0].push_back(at::empty_like(inputs[0]));
  c10d::AllgatherOptions opts;
  opts.asyncOp = true;
  group->allgather(all, inputs, opts)->wait();
  std::vector<std::vector<std::int64_t>> orders;
  for (const at::Tensor& one : all[0]) {
    const at::Tensor found = one.cpu();
    const auto* const row = found.const_data_ptr<std::int64_t>();
    orders.emplace_back(row, std::find(row, row + count, -1));
  }
  return orders;
}

}  // namespace dreamcomm
