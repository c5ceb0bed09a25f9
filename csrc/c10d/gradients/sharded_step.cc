#include "c10d/gradients/sharded_step.h"

#include <algorithm>

#include "c10d/gradients/sharded_reduction.h"
#include "kernels/widen.h"

namespace dreamcomm {
namespace {

std::byte* memory_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<std::byte*>(tensor.mutable_data_ptr()) : nullptr;
}

}  // namespace

void ShardedStep::add(const Gradient& gradient, const at::Tensor& placed, int rule) {
  ShardedPart& part = parts_.emplace_back(sharded_part(gradient, placed, world_, rank_));
  if (!reads_) part.present = gradient.parameter.grad().defined();
  part.parameter = memory_of(gradient.parameter);
  const Shard& shard = gradient.shard;
  Member& member = members_.emplace_back();
  member.rule = rule;
  member.master = memory_of(shard.master);
  member.gradient = memory_of(shard.gradient);
  std::transform(shard.state.begin(), shard.state.end(), member.state.begin(), memory_of);
  touched_.push_back(false);
}

void ShardedStep::apply(std::size_t part, std::size_t begin, std::size_t count,
                        const std::byte* average) {
  const ShardedPart& one = parts_[part];
  const Member& member = members_[part];
  const std::size_t item = item_size(one.sum_type);
  const std::size_t offset = (begin - one.begin) * item;
  std::byte* const parameter = one.parameter + begin * item_size(one.parameter_type);
  if (!rules_.empty()) {
    OptimizerMemory memory;
    memory.parameter = member.master == nullptr ? parameter : member.master + offset;
    for (std::size_t i = 0; i < member.state.size(); ++i) {
      memory.state[i] = member.state[i] == nullptr ? nullptr : member.state[i] + offset;
    }
    const std::byte* const gradient = reads_ ? average : member.gradient + offset;
    optimizer_step(rules_[static_cast<std::size_t>(member.rule)], one.sum_type, memory, gradient,
                   count);
  }
  if (member.master == nullptr) return;
  if (one.sum_type == DType::kFloat64) {
    kernels::narrow(one.parameter_type, reinterpret_cast<const double*>(member.master + offset),
                    parameter, count);
  } else {
    kernels::narrow(one.parameter_type, reinterpret_cast<const float*>(member.master + offset),
                    parameter, count);
  }
}

}  // namespace dreamcomm
