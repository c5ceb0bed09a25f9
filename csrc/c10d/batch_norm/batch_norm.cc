#include "c10d/batch_norm/batch_norm.h"

#include <ATen/TensorIterator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

#include "c10d/base/convert.h"
#include "kernels/batch_norm.h"

namespace dreamcomm {
namespace {

constexpr int kTensors = 7;  // dx, dy, x, and the numbers of InputGradient

at::Tensor as_doubles(const at::Tensor& tensor) { return tensor.to(at::kDouble).contiguous(); }

/// The numbers of InputGradient, of each channel: scale, shift, mean, slope.
at::Tensor numbers_of(const std::optional<at::Tensor>& weight, const at::Tensor& mean,
                      const at::Tensor& variance, double eps, const at::Tensor& sums,
                      std::int64_t count) {
  const std::int64_t channels = mean.numel();
  at::Tensor numbers = at::empty({4, channels}, at::kDouble);
  const at::Tensor weights = weight ? as_doubles(weight->detach()) : at::Tensor();
  const at::Tensor means = as_doubles(mean);
  const at::Tensor variances = as_doubles(variance);
  const double* factor = weight ? weights.const_data_ptr<double>() : nullptr;
  const double* center = means.const_data_ptr<double>();
  const double* spread = variances.const_data_ptr<double>();
  const double* sum = sums.const_data_ptr<double>();
  double* out = numbers.mutable_data_ptr<double>();
  const auto rows = static_cast<double>(count);
  for (std::int64_t c = 0; c < channels; ++c) {
    const double inverse = 1.0 / std::sqrt(spread[c] + eps);
    out[c] = (factor != nullptr ? factor[c] : 1.0) * inverse;
    out[channels + c] = sum[c] / rows;
    out[2 * channels + c] = center[c];
    out[3 * channels + c] = inverse * sum[channels + c] / rows;
  }
  return numbers;
}

/// Runs of elements along the innermost dimension.
template <typename A>
void compute(at::TensorIterator& iterator, DType type) {
  const auto element = static_cast<std::int64_t>(item_size(type));
  const auto loop = [=](char** data, const std::int64_t* strides, std::int64_t inner,
                        std::int64_t outer) {
    const bool packed = std::all_of(strides, strides + 3, [=](auto s) { return s == element; });
    const auto all_step = [=](std::int64_t by) {
      return std::all_of(strides + 3, strides + kTensors, [=](auto s) { return s == by; });
    };
    const bool of_each = all_step(sizeof(A));
    const bool in_runs = packed && (of_each || all_step(0));
    for (std::int64_t row = 0; row < outer; ++row) {
      const auto at = [=](int tensor, std::int64_t i) {
        return reinterpret_cast<std::byte*>(data[tensor]) + row * strides[kTensors + tensor] +
               i * strides[tensor];
      };
      const auto run = [=](std::int64_t i, std::int64_t count) {
        const auto number = [=](int tensor) { return reinterpret_cast<const A*>(at(tensor, i)); };
        const InputGradient<A> how{number(3), number(4), number(5), number(6), of_each};
        input_gradient(how, type, at(1, i), at(2, i), at(0, i), static_cast<std::size_t>(count));
      };
      if (in_runs) {
        run(0, inner);
      } else {
        for (std::int64_t i = 0; i < inner; ++i) run(i, 1);
      }
    }
  };
  iterator.for_each(loop);
}

}  // namespace

at::Tensor statistics_row(const std::vector<double>& header, std::int64_t count,
                          std::int64_t channels, const std::optional<at::Tensor>& mean,
                          const std::optional<at::Tensor>& variance) {
  const auto first = static_cast<std::int64_t>(header.size());
  at::Tensor row = at::zeros({first + 1 + 2 * channels}, at::kDouble);
  double* out = row.mutable_data_ptr<double>();
  out = std::copy(header.begin(), header.end(), out);
  *out++ = static_cast<double>(count);
  if (count == 0) return row;
  TORCH_CHECK_VALUE(mean && variance, "expected the statistics of ", count, " rows");
  const at::Tensor means = as_doubles(*mean);
  const at::Tensor variances = as_doubles(*variance);
  TORCH_CHECK_VALUE(means.numel() == channels && variances.numel() == channels, "expected ",
                    channels, " channels");
  out = std::copy_n(means.const_data_ptr<double>(), channels, out);
  const double* spread = variances.const_data_ptr<double>();
  std::transform(spread, spread + channels, out,
                 [=](double one) { return one * static_cast<double>(count); });
  return row;
}

JoinedStatistics join_statistics(const at::Tensor& rows, std::int64_t header,
                                 c10::ScalarType type) {
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.scalar_type() == at::kDouble && rows.is_contiguous() &&
                        rows.size(1) > header,
                    "expected rows of float64");
  const std::int64_t channels = (rows.size(1) - header - 1) / 2;
  at::Tensor mean = at::zeros({channels}, at::kDouble);
  at::Tensor variance = at::zeros({channels}, at::kDouble);
  RowStatistics joined{0, mean.mutable_data_ptr<double>(), variance.mutable_data_ptr<double>()};
  for (std::int64_t rank = 0; rank < rows.size(0); ++rank) {
    const double* row = rows.const_data_ptr<double>() + rank * rows.size(1) + header;
    join(joined, row[0], row + 1, row + 1 + channels, static_cast<std::size_t>(channels));
  }
  if (joined.count > 0) {
    std::transform(joined.squares, joined.squares + channels, joined.squares,
                   [&](double one) { return one / joined.count; });
  }
  return {static_cast<std::int64_t>(joined.count), mean.to(type), variance.to(type)};
}

void take_into_running(const std::optional<at::Tensor>& buffer, const at::Tensor& found,
                       double factor, double share) {
  if (!buffer) return;
  TORCH_CHECK_VALUE(buffer->numel() == found.numel(), "expected running statistics of ",
                    found.numel(), " channels, got ", buffer->numel());
  const at::NoGradGuard no_graph;
  at::Tensor next = at::empty({found.numel()}, at::kDouble);
  const at::Tensor olds = as_doubles(*buffer);
  const at::Tensor news = as_doubles(found);
  const double* old = olds.const_data_ptr<double>();
  std::transform(
      old, old + found.numel(), news.const_data_ptr<double>(), next.mutable_data_ptr<double>(),
      [=](double before, double now) { return (1.0 - share) * before + share * (factor * now); });
  buffer->copy_(next.view(buffer->sizes()));
}

at::Tensor batch_norm_input_gradient(const at::Tensor& gradient, const at::Tensor& input,
                                     const std::optional<at::Tensor>& weight,
                                     const at::Tensor& mean, const at::Tensor& variance, double eps,
                                     const at::Tensor& sums, std::int64_t count) {
  const DType type = to_dtype(input.scalar_type());
  const std::int64_t channels = input.size(1);
  TORCH_CHECK_VALUE(is_floating(type) && gradient.scalar_type() == input.scalar_type() &&
                        gradient.sizes() == input.sizes(),
                    "expected a gradient of the input's shape and type");
  TORCH_CHECK_VALUE(mean.numel() == channels && variance.numel() == channels &&
                        (!weight || weight->numel() == channels) &&
                        sums.scalar_type() == at::kDouble && sums.is_contiguous() &&
                        sums.numel() == 2 * channels && count > 0,
                    "expected statistics of ", channels, " channels");
  const bool doubles = type == DType::kFloat64;
  const at::Tensor numbers =
      numbers_of(weight, mean, variance, eps, sums, count).to(doubles ? at::kDouble : at::kFloat);
  at::Tensor out = at::empty_like(input);
  std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = channels;
  std::vector<at::Tensor> parts;
  for (std::int64_t i = 0; i < 4; ++i) parts.push_back(numbers[i].view(shape));
  auto config = at::TensorIteratorConfig();
  config.set_check_mem_overlap(false).check_all_same_dtype(false).resize_outputs(false);
  config.add_output(out).add_const_input(gradient).add_const_input(input);
  for (const at::Tensor& part : parts) config.add_const_input(part);
  auto iterator = config.build();
  if (doubles) {
    compute<double>(iterator, type);
  } else {
    compute<float>(iterator, type);
  }
  return out;
}

}  // namespace dreamcomm
