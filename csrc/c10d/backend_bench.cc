// What the benchmark measures below torch's dispatch.
#include "bench/trial.h"
#include "c10d/backend.h"
#include "c10d/convert.h"

namespace dreamcomm {
namespace {

/// Rows of calls in two tensors of two dimensions, each row one call's blocks.
Trial trial_of(Kind kind, const at::Tensor& input, const at::Tensor& output, int samples) {
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
  TORCH_CHECK_VALUE(samples > 0, "expected samples to be positive, got ", samples);
  return {kind,          to_dtype(input.scalar_type()),           block(input),
          block(output), static_cast<std::size_t>(input.size(0)), samples};
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
  TORCH_CHECK_VALUE(comm_, "the group has no core to measure: ", reason_);
  return as_torch(
      [&] { return dreamcomm::time_core(*comm_, trial_of(kind, input, output, samples)); });
}

std::vector<double> DreamBackend::time_ceiling(Kind kind, const Tensor& input, const Tensor& output,
                                               int samples) {
  require_open();
  TORCH_CHECK_VALUE(comm_ && heap_,
                    "the ceiling is measured in the shared heap: ", comm_ ? no_heap_ : reason_);
  return as_torch([&] {
    return dreamcomm::time_ceiling(*comm_, *heap_, trial_of(kind, input, output, samples));
  });
}

}  // namespace dreamcomm
