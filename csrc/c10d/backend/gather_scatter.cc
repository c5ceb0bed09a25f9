// All-gather and reduce-scatter: lists, one flat tensor, and several at once.
#include "c10d/backend/backend.h"
#include "c10d/base/convert.h"
#include "c10d/base/op_labels.h"

namespace dreamcomm {
namespace {

/// True if `part` is exactly the bytes of `whole` from `offset` on.
bool is_slice(const at::Tensor& part, const at::Tensor& whole, std::size_t offset) {
  return is_plain(part) && is_plain(whole) &&
         part.const_data_ptr() == static_cast<const std::byte*>(whole.const_data_ptr()) + offset;
}

std::vector<std::size_t> equal_parts(const at::Tensor& tensor, int parts) {
  const auto n = static_cast<std::size_t>(parts);
  return std::vector<std::size_t>(n, tensor.nbytes() / n);
}

}  // namespace

void DreamBackend::fill_gathered(Call& call, const Site& site, const TensorList& outputs,
                                 const Tensor& input) {
  require_length(site, "tensor_list", outputs.size(), static_cast<std::size_t>(size_));
  require_dense(site, "tensor", input);
  const bool twice = any_overlap(outputs);  // then the last rank's block stays
  bool aside = false;  // the input may be this rank's own place, no other memory written to
  for (std::size_t r = 0; r < outputs.size(); ++r) {
    require_writable(site, "tensor_list", outputs[r]);
    require_match(site, "tensor_list", outputs[r], input, input.numel());
    const bool own = r == static_cast<std::size_t>(rank_) && is_slice(input, outputs[r], 0);
    aside = aside || (!own && overlap(input, outputs[r]));
    call.output(outputs[r], twice);
  }
  call.input(input, aside || twice);
}

Call DreamBackend::shard_gather(const Site& site, const Tensor& output, const Tensor& input) {
  require_dense(site, "input", input);
  require_writable(site, "output", output);
  require_match(site, "output", output, input, input.numel() * size_);
  const bool own = is_slice(input, output, input.nbytes() * static_cast<std::size_t>(rank_));
  Call call(Kind::kAllGather, moving(input));
  call.input(input, !own && overlap(input, output));
  call.output(output, equal_parts(output, size_));
  return call;
}

Call DreamBackend::shard_reduction(const Site& site, const Tensor& output, const Tensor& input,
                                   const c10d::ReduceOp& op) {
  require_dense(site, "input", input);
  require_writable(site, "output", output);
  require_match(site, "input", input, output, output.numel() * size_);
  Call call(Kind::kReduceScatter, to_reduction(op, input.scalar_type(), site));
  call.input(input, equal_parts(input, size_));
  call.output(output, overlap(output, input));
  call.averaged_by(op);
  return call;
}

WorkPtr DreamBackend::allgather(std::vector<TensorList>& outputs, TensorList& inputs,
                                const c10d::AllgatherOptions& opts) {
  const Site site = at(kAllGather);
  const Tensor& input = only(site, "input_tensors", inputs);
  if (!serves(input)) {
    return forward(input,
                   [&](c10d::Backend& inner) { return inner.allgather(outputs, inputs, opts); });
  }
  require_length(site, "output_tensors", outputs.size(), 1);
  Calls calls;
  fill_gathered(calls.emplace_back(Kind::kAllGather, moving(input)), site, outputs[0], input);
  return issue({kAllGather, inputs, outputs[0], opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::_allgather_base(Tensor& output, Tensor& input,
                                      const c10d::AllgatherOptions& opts) {
  if (!serves(input)) {
    return forward(
        input, [&](c10d::Backend& inner) { return inner._allgather_base(output, input, opts); });
  }
  Calls calls;
  calls.push_back(shard_gather(at(kAllGatherBase), output, input));
  return issue({kAllGatherBase, input, output, opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::allgather_coalesced(std::vector<TensorList>& outputs, TensorList& inputs,
                                          const c10d::AllgatherOptions& opts) {
  const Site site = at(kAllGatherCoalesced);
  TORCH_CHECK_VALUE(!inputs.empty(), site, "expected 'input_tensor_list' not to be empty");
  if (!serves(inputs[0])) {
    return forward(inputs[0], [&](c10d::Backend& inner) {
      return inner.allgather_coalesced(outputs, inputs, opts);
    });
  }
  // outputs[rank][i] receives what the rank gave as inputs[i].
  require_length(site, "output_tensor_lists", outputs.size(), static_cast<std::size_t>(size_));
  TensorList all;
  for (const TensorList& of_rank : outputs) {
    require_length(site, "output_tensor_lists[...]", of_rank.size(), inputs.size());
    all.insert(all.end(), of_rank.begin(), of_rank.end());
  }
  Calls calls;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    require_same_device(site, "input_tensor_list", inputs[i], inputs[0]);
    TensorList of_input;
    for (const TensorList& of_rank : outputs) of_input.push_back(of_rank[i]);
    fill_gathered(calls.emplace_back(Kind::kAllGather, moving(inputs[i])), site, of_input,
                  inputs[i]);
  }
  return issue({kAllGatherCoalesced, inputs, all, opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  const Site site = at(kAllGatherCoalesced);
  TORCH_CHECK_VALUE(!inputs.empty(), site, "expected 'inputs' not to be empty");
  if (!serves(inputs[0])) {
    return forward(inputs[0], [&](c10d::Backend& inner) {
      return inner.allgather_into_tensor_coalesced(outputs, inputs, opts);
    });
  }
  require_length(site, "outputs", outputs.size(), inputs.size());
  Calls calls;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    require_same_device(site, "inputs", inputs[i], inputs[0]);
    calls.push_back(shard_gather(site, outputs[i], inputs[i]));
  }
  return issue({kAllGatherCoalesced, inputs, outputs, opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::reduce_scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                                     const c10d::ReduceScatterOptions& opts) {
  const Site site = at(kReduceScatter);
  const Tensor& output = only(site, "output_tensors", outputs);
  if (!serves(site, output, opts.reduceOp)) {
    return forward(
        output, [&](c10d::Backend& inner) { return inner.reduce_scatter(outputs, inputs, opts); });
  }
  require_length(site, "input_tensors", inputs.size(), 1);
  const TensorList& parts = inputs[0];
  require_length(site, "input_list", parts.size(), static_cast<std::size_t>(size_));
  require_writable(site, "output", output);
  const Reduction how = to_reduction(opts.reduceOp, output.scalar_type(), site);
  const Tensor& own = parts[static_cast<std::size_t>(rank_)];
  require_match(site, "output", output, own, own.numel());
  bool aside = false;
  bool even = true;
  for (const Tensor& part : parts) {
    require_dense(site, "input_list", part);
    require_same_type(site, "input_list", part, output);
    even = even && part.numel() == output.numel();
    aside = aside || overlap(output, part);
  }
  Calls calls;
  if (even) {
    Call& call = calls.emplace_back(Kind::kReduceScatter, how);
    for (const Tensor& part : parts) call.input(part);
    call.output(output, aside);
    call.averaged_by(opts.reduceOp);
  }
  // Blocks of different sizes are reduced one by one, each to the rank it is for.
  for (int root = 0; !even && root < size_; ++root) {
    Call& call = calls.emplace_back(Kind::kReduce, how, root);
    call.input(parts[static_cast<std::size_t>(root)], aside);
    if (root == rank_) call.output(output, aside);
    call.averaged_by(opts.reduceOp);
  }
  return issue({kReduceScatter, parts, outputs, opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::_reduce_scatter_base(Tensor& output, Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
  const Site site = at(kReduceScatterBase);
  if (!serves(site, input, opts.reduceOp)) {
    return forward(input, [&](c10d::Backend& inner) {
      return inner._reduce_scatter_base(output, input, opts);
    });
  }
  Calls calls;
  calls.push_back(shard_reduction(site, output, input, opts.reduceOp));
  return issue({kReduceScatterBase, input, output, opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                      const c10d::ReduceScatterOptions& opts) {
  const Site site = at(kReduceScatterCoalesced);
  TORCH_CHECK_VALUE(!inputs.empty(), site, "expected 'inputs' not to be empty");
  if (!serves_all(site, inputs, opts.reduceOp)) {
    return forward(inputs[0], [&](c10d::Backend& inner) {
      return inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts);
    });
  }
  require_length(site, "outputs", outputs.size(), inputs.size());
  Calls calls;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    require_same_device(site, "inputs", inputs[i], inputs[0]);
    calls.push_back(shard_reduction(site, outputs[i], inputs[i], opts.reduceOp));
  }
  return issue({kReduceScatterCoalesced, inputs, outputs, opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::sharded_pass(std::shared_ptr<ShardedPass> pass, const TensorList& tensors,
                                   const c10d::ReduceOp& op, bool async) {
  const OpLabel& label = !pass->writes() ? kShardedReduce
                         : pass->reads() ? kShardedStep
                                         : kShardedWrite;
  const Kind kind = !pass->writes() ? Kind::kReduceScatter
                    : pass->reads() ? Kind::kAllReduce
                                    : Kind::kAllGather;
  TORCH_CHECK_VALUE(shares_heaps(), at(label), "the ranks do not map each other's heaps");
  for (const Tensor& tensor : tensors) {
    if (tensor.is_cpu() && heap_->holds(static_cast<const std::byte*>(tensor.const_data_ptr())))
      continue;
    // The peers would wait for this rank.
    cpu_->abort(concat("a tensor of a sharded optimizer does not lie in the heap: ",
                       heap_->describe(), "; set Options(heap_bytes=...) to more"));
  }
  Calls calls;
  Reduction how;
  set_average(how, op, size_);
  Call& call = calls.emplace_back(kind, how);
  call.pass(std::move(pass), tensors);
  call.averaged_by(op);
  // The work keeps no tensor: their memory is free for the next ones when the pass has ended.
  return issue({label, {}, {}, c10d::kUnsetTimeout, async}, calls);
}

}  // namespace dreamcomm
