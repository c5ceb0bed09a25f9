// The benchmark's measurements below torch's dispatch, and predictions.
#include "algorithms/cost/explain.h"
#include "algorithms/primitives.h"
#include "bench/trial.h"
#include "c10d/backend/backend.h"
#include "c10d/base/check_args.h"
#include "c10d/base/convert.h"
#include "comm/tuning/costs_file.h"

namespace dreamcomm {
namespace {

/// Rows of calls in two tensors of two dimensions, each row one call's blocks.
Trial trial_of(Kind kind, const at::Tensor& input, const at::Tensor& output, int samples,
               const Interrupt& interrupt) {
  const auto block = [](const at::Tensor& tensor) {
    return Block{static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
  };
  for (const at::Tensor& tensor : {input, output}) {
    TORCH_CHECK_VALUE(tensor.defined() && tensor.is_cpu() && tensor.is_contiguous() &&
                          tensor.dim() == 2 && tensor.size(0) == input.size(0) &&
                          tensor.size(0) > 0 && tensor.scalar_type() == input.scalar_type(),
                      "expected input and output to be contiguous tensors on cpu of one type and ",
                      "two dimensions, with equally many rows");
  }
  TORCH_CHECK_VALUE(
      input.is_same(output) || input.data_ptr() == output.data_ptr() || !overlap(input, output),
      "expected input and output to be the same memory or apart");
  TORCH_CHECK_VALUE(samples > 0, "expected samples to be positive, got ", samples);
  return {kind,          to_dtype(input.scalar_type()),           block(input),
          block(output), static_cast<std::size_t>(input.size(0)), samples,
          interrupt};
}

template <typename Measure>
std::vector<double> as_torch(Measure&& measure) {
  try {
    return measure();
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
}

}  // namespace

std::vector<double> DreamBackend::time_core(Kind kind, const Tensor& input, const Tensor& output,
                                            int samples) {
  require_open();
  TORCH_CHECK_VALUE(cpu_, "the group has no core to measure: ", reason_);
  Communicator& host = single_host("the core is measured");
  return as_torch([&] {
    return dreamcomm::time_core(host, trial_of(kind, input, output, samples, interrupt_));
  });
}

std::vector<double> DreamBackend::time_ceiling(Kind kind, const Tensor& input, const Tensor& output,
                                               int samples) {
  require_open();
  TORCH_CHECK_VALUE(cpu_ && heap_,
                    "the ceiling is measured in the shared heap: ", cpu_ ? no_heap_ : reason_);
  Communicator& host = single_host("the ceiling is measured");
  return as_torch([&] {
    return dreamcomm::time_ceiling(host, *heap_,
                                   trial_of(kind, input, output, samples, interrupt_));
  });
}

Prediction DreamBackend::predict(Kind kind, std::size_t bytes, bool in_heaps) const {
  TORCH_CHECK_VALUE(cpu_, "the group has no core to predict: ", reason_);
  const bool shards = kind == Kind::kAllGather || kind == Kind::kReduceScatter;
  const std::size_t block = shards ? bytes / static_cast<std::size_t>(size_) : bytes;
  return cpu_->predict(kind, block, in_heaps);
}

std::string explain_world(Kind kind, std::size_t bytes, int size, bool in_heaps) {
  const DreamOptions options;
  const std::string path = costs_path(size, options.page_bytes, true);
  const std::optional<Costs> known = load_costs(path);
  const Costs costs = known.value_or(Costs::fixed());
  CallShape call{kind, ReduceOp::kSum, bytes, size, options.page_bytes - Primitives::kSignature};
  const Preference preference{"auto", true, &costs};
  call.in_heap = call.out_heap = in_heaps;
  return concat(explain(call, preference, concat("shm, ", size, " ranks of one host"),
                        options.heap_bytes > 0),
                "\n  (costs: ",
                known ? concat("those of ", path)
                      : "fixed ones; no group of this size was made on this machine yet",
                ')');
}

}  // namespace dreamcomm
