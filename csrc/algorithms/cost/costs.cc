#include "algorithms/cost/costs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <string_view>

namespace dreamcomm {
namespace {

constexpr std::string_view kTitle = "dreamcomm-costs-3";
constexpr std::string_view kEnd = "end";
constexpr std::array kNames =
    std::to_array<std::string_view>({"give", "take", "fold", "pull", "fold_heaps", "reduce_heaps"});
static_assert(kNames.size() == kCopyKinds);

/// Seconds per byte, from nanoseconds per KiB.
constexpr double rate(double ns_per_kib) { return ns_per_kib * 1e-9 / 1024; }

double interpolate(const Costs::Rates& rates, std::size_t bytes) {
  const auto& sizes = Costs::kSizes;
  const auto above = std::lower_bound(sizes.begin(), sizes.end(), bytes);
  if (above == sizes.begin()) return rates.front();
  if (above == sizes.end()) return rates.back();
  const auto i = static_cast<std::size_t>(above - sizes.begin());
  const double low = std::log2(static_cast<double>(sizes[i - 1]));
  const double high = std::log2(static_cast<double>(sizes[i]));
  const double part = (std::log2(static_cast<double>(bytes)) - low) / (high - low);
  return rates[i - 1] + part * (rates[i] - rates[i - 1]);
}

}  // namespace

const Costs& Costs::fixed() {
  static const Costs costs{0.3e-6,
                           {{{rate(60), rate(80), rate(70), rate(40), rate(60), rate(80)},
                             {rate(40), rate(30), rate(30), rate(30), rate(60), rate(100)},
                             {rate(25), rate(20), rate(20), rate(20), rate(30), rate(40)},
                             {rate(50), rate(35), rate(35), rate(35), rate(60), rate(90)},
                             {rate(35), rate(30), rate(30), rate(35), rate(60), rate(90)},
                             {rate(60), rate(35), rate(30), rate(30), rate(35), rate(80)}}}};
  return costs;
}

double Costs::seconds(const CostTerms& terms, std::size_t bytes) const {
  double sum = terms.turns * turn;
  for (std::size_t m = 0; m < kCopyKinds; ++m) {
    if (terms.bytes[m] > 0) sum += terms.bytes[m] * interpolate(rates[m], bytes);
  }
  return sum;
}

std::string to_text(const Costs& costs) {
  std::ostringstream text;
  text.precision(std::numeric_limits<double>::max_digits10);
  text << kTitle << "\nturn " << costs.turn << '\n';
  for (std::size_t m = 0; m < kCopyKinds; ++m) {
    text << kNames[m];
    for (const double value : costs.rates[m]) text << ' ' << value;
    text << '\n';
  }
  text << kEnd << '\n';
  return text.str();
}

std::optional<Costs> from_text(const std::string& text) {
  std::istringstream words(text);
  const auto is_next = [&](std::string_view name) {
    std::string word;
    return words >> word && word == name;
  };
  const auto read = [&](double& value) {
    return words >> value && std::isfinite(value) && value >= 0;
  };
  Costs costs;
  if (!is_next(kTitle) || !is_next("turn") || !read(costs.turn)) return std::nullopt;
  for (std::size_t m = 0; m < kCopyKinds; ++m) {
    if (!is_next(kNames[m])) return std::nullopt;
    for (double& value : costs.rates[m]) {
      if (!read(value)) return std::nullopt;
    }
  }
  std::string rest;
  if (!is_next(kEnd) || words >> rest) return std::nullopt;
  return costs;
}

}  // namespace dreamcomm
