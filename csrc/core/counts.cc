#include "core/counts.h"

#include <bit>
#include <limits>
#include <vector>

#include "core/error.h"

namespace dreamcomm {
namespace {

constexpr std::uint64_t kNoWeight = std::uint64_t{1} << 63;
constexpr std::uint64_t kFault = std::uint64_t{1} << 62;

std::string told(int rank, CountFault fault) {
  switch (fault) {
    case CountFault::kMissing:
      return concat("rank ", rank, " ran a backward pass without count(n) before it");
    case CountFault::kTwice:
      return concat("rank ", rank, " called count(n) several times before one backward pass");
    case CountFault::kReduced:
      return concat("rank ", rank,
                    " adds to gradients of an earlier reduction, which were not cleared");
  }
  return "";
}

std::string refusal_of(std::span<const std::uint64_t> counts) {
  std::string found;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const std::optional<CountFault> fault = RankCount(counts[i]).fault();
    if (!fault) continue;
    found += concat(found.empty() ? "" : "; ", told(static_cast<int>(i), *fault));
  }
  if (found.empty()) return found;
  return concat("reduce=\"tokens\": ", found,
                ". Call count(n) once before each backward pass, with 0 where it has no token, and "
                "zero_grad() before the first pass after a reduction. No data was moved");
}

/// Adds neighbours, then neighbours of these, until one is left.
double sum_along_tree(std::vector<double> values) {
  for (std::size_t step = 1; step < values.size(); step *= 2) {
    for (std::size_t i = 0; i + step < values.size(); i += 2 * step) values[i] += values[i + step];
  }
  return values.empty() ? 0 : values.front();
}

double sum_of(std::span<const std::uint64_t> counts, bool along_tree) {
  std::uint64_t whole = 0;
  bool all_whole = true;
  std::vector<double> weights;
  for (const std::uint64_t bits : counts) {
    const RankCount one(bits);
    weights.push_back(one.weight());
    all_whole = all_whole && one.is_whole();
    if (all_whole) whole += static_cast<std::uint64_t>(one.whole());
  }
  if (all_whole) return static_cast<double>(whole);
  if (along_tree) return sum_along_tree(std::move(weights));
  double sum = 0;
  for (const double one : weights) sum += one;
  return sum;
}

}  // namespace

RankCount RankCount::of_whole(std::int64_t number) {
  return RankCount(kNoWeight | static_cast<std::uint64_t>(number));
}

RankCount RankCount::of_weight(double weight) {
  return RankCount(std::bit_cast<std::uint64_t>(weight + 0.0));  // not -0
}

RankCount RankCount::of_fault(CountFault fault) {
  return RankCount(kNoWeight | kFault | static_cast<std::uint64_t>(fault));
}

std::optional<CountFault> RankCount::fault() const {
  if ((bits_ & kNoWeight) == 0 || (bits_ & kFault) == 0) return std::nullopt;
  return static_cast<CountFault>(bits_ & ~(kNoWeight | kFault));
}

bool RankCount::is_whole() const { return (bits_ & kNoWeight) != 0 && (bits_ & kFault) == 0; }

std::int64_t RankCount::whole() const { return static_cast<std::int64_t>(bits_ & ~kNoWeight); }

double RankCount::weight() const {
  return is_whole() ? static_cast<double>(whole()) : std::bit_cast<double>(bits_);
}

void GradientCounts::take(std::span<const std::uint64_t> counts) {
  const std::scoped_lock lock(mutex_);
  add_up(counts);
}

void GradientCounts::add_up(std::span<const std::uint64_t> counts) {
  known_ = true;
  refusal_ = refusal_of(counts);
  if (!refusal_.empty()) return;
  const double sum = sum_of(counts, along_tree_);
  divisor_ = sum > 0 ? sum : std::numeric_limits<double>::infinity();
}

void GradientCounts::require() {
  const std::scoped_lock lock(mutex_);
  if (!known_ && !place_.empty()) add_up(place_);
  check(refusal_.empty(), ErrorKind::kMismatch, refusal_);
}

}  // namespace dreamcomm
