#include "c10d/buckets/moves/heap_pass.h"

#include <array>
#include <cstring>

#include "c10d/base/convert.h"
#include "kernels/reduce.h"

namespace dreamcomm {

ShardedPart sharded_part(const Parameter& parameter, const at::Tensor& placed, int world,
                         int rank) {
  const RankRange mine = parameter.elements(world, rank);
  ShardedPart part;
  part.present = placed.defined();
  if (part.present) part.gradient = static_cast<const std::byte*>(placed.const_data_ptr());
  part.gradient_type = to_dtype(parameter.gradient_type());
  part.parameter_type = to_dtype(parameter.tensor.scalar_type());
  part.sum_type = to_dtype(parameter.shard.sum_type);
  part.numel = static_cast<std::size_t>(parameter.tensor.numel());
  part.begin = static_cast<std::size_t>(mine.begin);
  part.count = static_cast<std::size_t>(mine.count);
  part.replicated = parameter.tensor.dim() == 0;
  return part;
}

void ReduceToShards::add(Parameter& parameter, const at::Tensor& placed) {
  const ShardedPart& part = parts_.emplace_back(sharded_part(parameter, placed, world_, rank_));
  GradientShard& shard = parameter.shard;
  averages_.push_back(shard.next_memory(static_cast<std::int64_t>(part.count), c10::kCPU));
  if (!shard.gradient.defined()) shard.gradient = averages_.back();
  auto* const memory = static_cast<std::byte*>(averages_.back().mutable_data_ptr());
  targets_.push_back({memory, shard.adds() ? memory : nullptr});
  touched_.push_back(false);
}

void ReduceToShards::apply(std::size_t part, std::size_t begin, std::size_t count,
                           const std::byte* average) {
  const ShardedPart& one = parts_[part];
  const std::size_t item = item_size(one.sum_type);
  std::byte* const to = targets_[part].memory + (begin - one.begin) * item;
  if (targets_[part].addend == nullptr) {
    std::memcpy(to, average, count * item);
    return;
  }
  const std::array<const std::byte*, 2> both{to, average};
  reduce({.dtype = one.sum_type, .op = ReduceOp::kSum}, both, to, count);
}

}  // namespace dreamcomm
