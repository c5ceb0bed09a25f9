#include "c10d/buckets/moves/optimizer_pass.h"

#include <span>
#include <utility>

#include "c10d/base/pages.h"
#include "c10d/buckets/moves/heap_pass.h"
#include "c10d/buckets/moves/step_rows.h"
#include "kernels/widen.h"

namespace dreamcomm {
namespace {

class StepPass final : public ShardedPass {
 public:
  StepPass(const Rule& rule, std::span<const OptimizerRule> rules, Move before)
      : world_(rule.group->getSize()),
        rank_(rule.group->getRank()),
        factor_(rule.factor_or(0)),
        rules_(rules),
        before_(before) {}
  /// `placed`: the gradient in this rank's heap, of a pass that reads.
  void add(const Parameter& parameter, const at::Tensor& placed, int rule,
           const std::optional<at::Tensor>& master, const std::vector<at::Tensor>& state) {
    ShardedPart& part = parts_.emplace_back(sharded_part(parameter, placed, world_, rank_));
    if (!reads()) part.present = parameter.tensor.grad().defined();
    part.parameter = memory_of(parameter.tensor);
    Member& member = members_.emplace_back();
    member.rule = static_cast<std::size_t>(rule);
    member.rows = memory_of(master.value_or(at::Tensor()), state);
    member.gradient = memory_of(parameter.shard.gradient);
    touched_.push_back(false);
  }

  std::span<const ShardedPart> parts() const override { return parts_; }
  bool reads() const override { return before_ == Move::kSumRows; }
  bool writes() const override { return true; }
  double factor() const override { return factor_; }
  void apply(std::size_t part, std::size_t begin, std::size_t count,
             const std::byte* average) override;
  void touch(std::size_t part) override { touched_[part] = true; }
  const std::vector<bool>& touched() const { return touched_; }

 private:
  struct Member {
    std::size_t rule = 0;
    OptimizerMemory rows;  // of the master; its parameter is null: the parameter is stepped itself
    const std::byte* gradient = nullptr;  // of the shard
  };
  const int world_;
  const int rank_;
  const double factor_;
  const std::span<const OptimizerRule> rules_;
  const Move before_;
  std::vector<ShardedPart> parts_;
  std::vector<Member> members_;
  std::vector<bool> touched_;
};

void StepPass::apply(std::size_t part, std::size_t begin, std::size_t count,
                     const std::byte* average) {
  const ShardedPart& one = parts_[part];
  const Member& member = members_[part];
  const std::size_t item = item_size(one.sum_type);
  const std::size_t offset = (begin - one.begin) * item;
  std::byte* const parameter = one.parameter + begin * item_size(one.parameter_type);
  const bool has_master = member.rows.parameter != nullptr;
  std::byte* const master = has_master ? member.rows.parameter + offset : nullptr;
  if (!rules_.empty()) {
    OptimizerMemory memory = memory_from(member.rows, offset);
    memory.parameter = has_master ? master : parameter;
    const std::byte* const gradient = reads() ? average : member.gradient + offset;
    optimizer_step(rules_[member.rule], one.sum_type, memory, gradient, count);
  }
  if (!has_master) return;
  if (one.sum_type == DType::kFloat64) {
    kernels::narrow(one.parameter_type, reinterpret_cast<const double*>(master), parameter, count);
  } else {
    kernels::narrow(one.parameter_type, reinterpret_cast<const float*>(master), parameter, count);
  }
}

}  // namespace

OptimizerPass::OptimizerPass(std::shared_ptr<BucketSet> set,
                             std::vector<std::optional<at::Tensor>> masters,
                             std::vector<std::vector<at::Tensor>> states)
    : set_(std::move(set)), masters_(std::move(masters)), states_(std::move(states)) {
  const BucketSet::Lock lock(set_->mutex);
  const std::size_t count = set_->parameters.size();
  TORCH_CHECK_VALUE(masters_.size() == count && states_.size() == count, set_->who,
                    ": expected one master and state for each of ", count, " parameters");
}

/// This rank's gradients in its heap, in the order of the parameters.
std::vector<at::Tensor> OptimizerPass::place_gradients() {
  set_->touch_rest();
  std::vector<at::Tensor> placed(set_->parameters.size());
  for (Bucket& bucket : set_->buckets) {
    const std::vector<at::Tensor> members = bucket.place(set_->parameters, set_->rule);
    for (std::size_t i = 0; i < members.size(); ++i) placed[bucket.members()[i]] = members[i];
  }
  return placed;
}

std::vector<bool> OptimizerPass::step(const std::vector<OptimizerRule>& rules,
                                      const std::vector<int>& rule_of, Move before) {
  const BucketSet::Lock lock(set_->mutex);
  const Rule& rule = set_->rule;
  Parameters& parameters = set_->parameters;
  TORCH_CHECK(set_->pass.expired(), set_->who,
              ": step() was called within a backward pass; call it afterwards");
  TORCH_CHECK_VALUE(rule.heaps, set_->who, ": the ranks do not map each other's heaps");
  for (const Parameter& one : parameters) {
    TORCH_CHECK_VALUE(before != Move::kSumRows || one.factor == 0, set_->who, ": the gradient of '",
                      one.name, "' has a factor of its own: reduce gradients before the step");
  }
  std::vector<at::Tensor> placed(parameters.size());
  if (before == Move::kSumRows) {
    placed = place_gradients();
    set_->begin_counts();
  }
  const auto pass = std::make_shared<StepPass>(rule, rules, before);
  std::vector<at::Tensor> used;
  std::vector<std::size_t> numbers;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].tensor.numel() == 0) continue;
    pass->add(parameters[i], placed[i], rules.empty() ? 0 : rule_of.at(i), masters_[i], states_[i]);
    used.push_back(parameters[i].tensor);
    if (placed[i].defined()) used.push_back(placed[i]);
    numbers.push_back(i);
  }
  const c10d::ReduceOp op =
      before == Move::kSumRows ? rule.op(0) : c10d::ReduceOp(c10d::ReduceOp::SUM);
  rule.heaps->sharded_pass(pass, used, op, /*async=*/false)->wait();
  // Gradients of the first pass may have been made elsewhere, and are in the heap now.
  if (steps_++ == 0) give_back_free_pages();
  std::vector<bool> touched(parameters.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    touched[numbers[i]] = pass->touched()[i];
    if (pass->touched()[i]) parameters[numbers[i]].tensor.unsafeGetTensorImpl()->bump_version();
  }
  return touched;
}

}  // namespace dreamcomm
