// Batch norm over the rows of several ranks: what torch has no operators for on CPUs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace dreamcomm {

/// A rank's message about its rows: the header, its number of rows, and for each channel the mean
/// and the sum of squared deviations, in float64. Without rows these are zeros.
at::Tensor statistics_row(const std::vector<double>& header, std::int64_t count,
                          std::int64_t channels, const std::optional<at::Tensor>& mean,
                          const std::optional<at::Tensor>& variance);

/// The statistics of all ranks' rows.
struct JoinedStatistics {
  std::int64_t count = 0;
  at::Tensor mean;
  at::Tensor variance;  // the sum of squares over the number of rows
};

/// Joins what ranks have sent, rank 0's first: the same bits on each.
JoinedStatistics join_statistics(const at::Tensor& rows, std::int64_t header, c10::ScalarType type);

/// buffer = (1 - share) * buffer + share * factor * found, in float64, for each channel. Autograd
/// sees it as a change in place. Without a buffer it does nothing.
void take_into_running(const std::optional<at::Tensor>& buffer, const at::Tensor& found,
                       double factor, double share);

/// The gradient of the input, laid out as the input is.
///
/// `sums` has the sums over all ranks' rows of the output's gradient, then of its product with the
/// normalised input. `gradient` is laid out as `input`, or computed with more slowly.
at::Tensor batch_norm_input_gradient(const at::Tensor& gradient, const at::Tensor& input,
                                     const std::optional<at::Tensor>& weight,
                                     const at::Tensor& mean, const at::Tensor& variance, double eps,
                                     const at::Tensor& sums, std::int64_t count);

}  // namespace dreamcomm
