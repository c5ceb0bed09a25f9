// Makes requests of torch's arguments: all collectives except all-gather and
// reduce-scatter. Each checks its arguments before anything is sent.
#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include "c10d/backend/backend.h"
#include "c10d/base/convert.h"
#include "c10d/base/gil_signals.h"
#include "c10d/base/op_labels.h"

namespace dreamcomm {
namespace {

void require_root_tensor(const Site& site, int64_t index) {
  TORCH_CHECK_VALUE(index == 0, site, "expected 'rootTensor' to be 0, got ", index);
}

/// True if `tensor` shares memory with one of `others`.
bool overlaps_any(const at::Tensor& tensor, Tensors others) {
  for (const at::Tensor& other : others) {
    if (overlap(tensor, other)) return true;
  }
  return false;
}

}  // namespace

WorkPtr DreamBackend::broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) {
  const Site site = at(kBroadcast);
  const Tensor& tensor = only(site, "tensors", tensors);
  if (!serves(tensor)) {
    return forward(tensor, [&](c10d::Backend& inner) { return inner.broadcast(tensors, opts); });
  }
  const int root = require_rank(site, "src", opts.rootRank);
  require_root_tensor(site, opts.rootTensor);
  require_writable(site, "tensor", tensor);
  Calls calls;
  Call& call = calls.emplace_back(Kind::kBroadcast, moving(tensor), root);
  if (rank_ == root) {
    call.in_place(tensor);
  } else {
    call.output(tensor);
  }
  return issue({kBroadcast, tensors, tensors, opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  const Site site = at(kAllReduce);
  const Tensor& tensor = only(site, "tensors", tensors);
  if (tensor.layout() != at::kStrided) return reduce_sparse(tensors, opts);
  if (!serves(site, tensor, opts.reduceOp)) {
    return forward(tensor, [&](c10d::Backend& inner) { return inner.allreduce(tensors, opts); });
  }
  require_writable(site, "tensor", tensor);
  Calls calls;
  Call& call =
      calls.emplace_back(Kind::kAllReduce, to_reduction(opts.reduceOp, tensor.scalar_type(), site));
  call.in_place(tensor);
  call.averaged_by(opts.reduceOp);
  return issue({kAllReduce, tensors, tensors, opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  const Tensor& tensor = only(at(kAllReduce), "tensors", tensors);
  return forward(tensor,
                 [&](c10d::Backend& inner) { return inner.allreduce_sparse(tensors, opts); });
}

WorkPtr DreamBackend::allreduce_coalesced(TensorList& tensors,
                                          const c10d::AllreduceCoalescedOptions& opts) {
  const Site site = at(kAllReduceCoalesced);
  TORCH_CHECK_VALUE(!tensors.empty(), site, "expected 'tensors' not to be empty");
  if (!serves_all(site, tensors, opts.reduceOp)) {
    return forward(tensors[0],
                   [&](c10d::Backend& inner) { return inner.allreduce_coalesced(tensors, opts); });
  }
  Calls calls;
  const bool aside = any_overlap(tensors);
  for (const Tensor& tensor : tensors) {
    require_writable(site, "tensors", tensor);
    require_same_device(site, "tensors", tensor, tensors[0]);
    Call& call = calls.emplace_back(Kind::kAllReduce,
                                    to_reduction(opts.reduceOp, tensor.scalar_type(), site));
    call.in_place(tensor, aside);
    call.averaged_by(opts.reduceOp);
  }
  return issue({kAllReduceCoalesced, tensors, tensors, opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::reduce(TensorList& tensors, const c10d::ReduceOptions& opts) {
  const Site site = at(kReduce);
  const Tensor& tensor = only(site, "tensors", tensors);
  if (!serves(site, tensor, opts.reduceOp)) {
    return forward(tensor, [&](c10d::Backend& inner) { return inner.reduce(tensors, opts); });
  }
  const int root = require_rank(site, "dst", opts.rootRank);
  require_root_tensor(site, opts.rootTensor);
  require_writable(site, "tensor", tensor);
  Calls calls;
  Call& call = calls.emplace_back(Kind::kReduce,
                                  to_reduction(opts.reduceOp, tensor.scalar_type(), site), root);
  if (rank_ == root) {
    call.in_place(tensor);
  } else {
    call.input(tensor);
  }
  return issue({kReduce, tensors, tensors, opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::gather(std::vector<TensorList>& outputs, TensorList& inputs,
                             const c10d::GatherOptions& opts) {
  const Site site = at(kGather);
  const Tensor& input = only(site, "input_tensors", inputs);
  if (!serves(input)) {
    return forward(input,
                   [&](c10d::Backend& inner) { return inner.gather(outputs, inputs, opts); });
  }
  const int root = require_rank(site, "dst", opts.rootRank);
  require_dense(site, "tensor", input);
  Calls calls;
  if (rank_ != root) {
    require_length(site, "gather_list on a rank that is not dst", outputs.size(), 0);
    calls.emplace_back(Kind::kGather, moving(input), root).input(input);
    return issue({kGather, inputs, {}, opts.timeout, opts.asyncOp}, calls);
  }
  require_length(site, "output_tensors", outputs.size(), 1);
  const TensorList& parts = outputs[0];
  fill_gathered(calls.emplace_back(Kind::kGather, moving(input), root), site, parts, input);
  return issue({kGather, inputs, parts, opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                              const c10d::ScatterOptions& opts) {
  const Site site = at(kScatter);
  const Tensor& output = only(site, "output_tensors", outputs);
  if (!serves(output)) {
    return forward(output,
                   [&](c10d::Backend& inner) { return inner.scatter(outputs, inputs, opts); });
  }
  const int root = require_rank(site, "src", opts.rootRank);
  require_writable(site, "tensor", output);
  Calls calls;
  Call& call = calls.emplace_back(Kind::kScatter, moving(output), root);
  if (rank_ != root) {
    require_length(site, "scatter_list on a rank that is not src", inputs.size(), 0);
    call.output(output);
    return issue({kScatter, {}, outputs, opts.timeout, opts.asyncOp}, calls);
  }
  require_length(site, "input_tensors", inputs.size(), 1);
  const TensorList& parts = inputs[0];
  require_length(site, "scatter_list", parts.size(), static_cast<std::size_t>(size_));
  for (const Tensor& part : parts) {
    require_dense(site, "scatter_list", part);
    require_match(site, "scatter_list", part, output, output.numel());
    call.input(part);
  }
  call.output(output, overlaps_any(output, parts));
  return issue({kScatter, parts, outputs, opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::alltoall(TensorList& outputs, TensorList& inputs,
                               const c10d::AllToAllOptions& opts) {
  const Site site = at(kAllToAll);
  require_length(site, "output_tensor_list", outputs.size(), static_cast<std::size_t>(size_));
  require_length(site, "input_tensor_list", inputs.size(), static_cast<std::size_t>(size_));
  if (!serves(inputs[0])) {
    return forward(inputs[0],
                   [&](c10d::Backend& inner) { return inner.alltoall(outputs, inputs, opts); });
  }
  Calls calls;
  Call& call = calls.emplace_back(Kind::kAllToAll, moving(inputs[0]));
  for (const Tensor& input : inputs) {
    require_dense(site, "input_tensor_list", input);
    require_same_type(site, "input_tensor_list", input, inputs[0]);
    call.input(input);
  }
  const bool aside = any_overlap(outputs);
  for (const Tensor& output : outputs) {
    require_writable(site, "output_tensor_list", output);
    require_same_type(site, "output_tensor_list", output, inputs[0]);
    call.output(output, aside || overlaps_any(output, inputs));
  }
  return issue({kAllToAll, inputs, outputs, opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::alltoall_base(Tensor& output, Tensor& input,
                                    std::vector<int64_t>& output_splits,
                                    std::vector<int64_t>& input_splits,
                                    const c10d::AllToAllOptions& opts) {
  const Site site = at(kAllToAllBase);
  if (!serves(input)) {
    return forward(input, [&](c10d::Backend& inner) {
      return inner.alltoall_base(output, input, output_splits, input_splits, opts);
    });
  }
  require_dense(site, "input", input);
  require_writable(site, "output", output);
  require_same_type(site, "output", output, input);
  Calls calls;
  Call& call = calls.emplace_back(Kind::kAllToAll, moving(input));
  call.input(input, split_bytes(site, "input", input, input_splits));
  call.output(output, split_bytes(site, "output", output, output_splits), overlap(output, input));
  return issue({kAllToAllBase, input, output, opts.timeout, opts.asyncOp}, calls);
}

WorkPtr DreamBackend::barrier(const c10d::BarrierOptions& opts) {
  Calls calls;
  calls.emplace_back(Kind::kBarrier, Reduction{});
  const Plan plan{kBarrier, {}, {}, opts.timeout, opts.asyncOp};
  // With device ids the caller means the work on those devices.
  const c10::DeviceType type = devices_->type();
  const bool on_devices =
      !opts.device_ids.empty() && (type != c10::DeviceType::CUDA || at::hasCUDA());
  if (on_devices) {
    const c10::Device device(type, static_cast<c10::DeviceIndex>(opts.device_ids[0]));
    if (devices_->handles(device)) require_open();
    if (devices_->serves(device)) return issue_on_device(plan, calls);
  }
  if (!cpu_ || on_devices) {
    sequence_.add(1);
    return forward_to(on_devices ? "cuda" : "cpu",
                      [&](c10d::Backend& inner) { return inner.barrier(opts); });
  }
  return issue(plan, calls);
}

void DreamBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const std::chrono::milliseconds timeout = timeout_of(opts.timeout);
  if (!cpu_) {
    c10d::BarrierOptions in_time = opts;
    in_time.timeout = timeout;
    fallback_.get("cpu")->monitoredBarrier(in_time, wait_all_ranks);
    return;
  }
  require_open();
  // Without a timeout rank 0 cannot find out which ranks are missing, so it names none.
  TORCH_CHECK_WITH(DistBackendError, rank_ != 0 || timeout.count() > 0,
                   "Rank 0 timed out in monitoredBarrier: its timeout is ", timeout.count(),
                   " ms, expected a positive one");
  try {
    cpu_->monitored_barrier(timeout, wait_all_ranks, check_signals, sequence_.read());
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
}

}  // namespace dreamcomm
