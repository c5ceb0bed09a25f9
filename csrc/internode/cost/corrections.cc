#include "internode/cost/corrections.h"

#include <algorithm>

namespace dreamcomm {

double Corrections::at(double bytes) const {
  const auto* const above = std::upper_bound(
      kSizes.begin(), kSizes.end(), bytes,
      [](double value, std::size_t size) { return value < static_cast<double>(size); });
  if (above == kSizes.begin()) return factors.front();
  if (above == kSizes.end()) return factors.back();
  const auto next = static_cast<std::size_t>(above - kSizes.begin());
  const auto low = static_cast<double>(kSizes[next - 1]);
  const double share = (bytes - low) / (static_cast<double>(*above) - low);
  return factors[next - 1] + share * (factors[next] - factors[next - 1]);
}

}  // namespace dreamcomm
