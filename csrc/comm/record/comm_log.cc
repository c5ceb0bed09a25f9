#include "comm/record/comm_log.h"

#include <algorithm>
#include <bit>

namespace dreamcomm {

std::size_t Histogram::place_of(std::int64_t nanoseconds) {
  const auto value = static_cast<std::uint64_t>(std::max<std::int64_t>(nanoseconds, 1));
  const auto doubling = static_cast<unsigned>(std::bit_width(value)) - 1;
  const std::uint64_t step = ((value - (std::uint64_t{1} << doubling)) * kSteps) >> doubling;
  return std::min<std::size_t>(doubling * std::size_t{kSteps} + step,
                               std::size_t{kSteps} * kDoublings - 1);
}

std::int64_t Histogram::middle_of(std::size_t place) {
  const std::uint64_t doubling = place / kSteps;
  const std::uint64_t base = std::uint64_t{1} << doubling;
  return static_cast<std::int64_t>(base +
                                   base * (2 * (place % kSteps) + 1) / (std::uint64_t{2} * kSteps));
}

std::int64_t Histogram::quantile(double share) const {
  std::int64_t total = 0;
  for (const Gauge& count : counts_) total += count.read();
  std::int64_t before = 0;
  for (std::size_t place = 0; place < counts_.size(); ++place) {
    before += counts_[place].read();
    if (before > 0 && static_cast<double>(before) >= share * static_cast<double>(total)) {
      return middle_of(place);
    }
  }
  return 0;
}

CommLog::Sums& CommLog::sums_of(Key key) {
  if (last_ != nullptr && key == last_key_) return *last_;
  auto found = sums_.find(key);
  if (found == sums_.end()) {
    if (counts_[static_cast<std::size_t>(key.first)]++ >= kMostLines) key.second = -1;
    const std::scoped_lock lock(mutex_);
    found = sums_.try_emplace(key).first;
    if (!found->second) found->second = std::make_unique<Sums>(size_);
  }
  last_key_ = key;
  last_ = found->second.get();
  return *last_;
}

void CommLog::add(const Record& record) {
  Sums& sums = sums_of({record.kind, record.bytes});
  if (record.state == Record::State::kFailed) {
    sums.failed.grow(1);
    return;
  }
  const std::int64_t took = record.ended_ns - record.entered_ns;
  sums.calls.grow(1);
  sums.total_ns.grow(took);
  sums.histogram.add(took);
  if (record.in_place) sums.in_place.grow(1);
  const std::int64_t waited = std::min(record.waited_ns(), took);
  if (waited == 0 || record.peer < 0) return;
  sums.waited_ns.grow(waited);
  sums.waits[static_cast<std::size_t>(record.peer)].grow(waited);
}

CommLog::Line CommLog::line_of(Key key, const Sums& sums) {
  Line line{.kind = key.first,
            .bytes = key.second,
            .calls = sums.calls.read(),
            .failed = sums.failed.read(),
            .total_ns = sums.total_ns.read(),
            .waited_ns = sums.waited_ns.read(),
            .p50_ns = sums.histogram.quantile(0.5),
            .p99_ns = sums.histogram.quantile(0.99),
            .in_place = sums.in_place.read()};
  for (std::size_t rank = 0; rank < sums.waits.size(); ++rank) {
    const std::int64_t waited = sums.waits[rank].read();
    if (waited <= line.for_slowest_ns) continue;
    line.slowest = static_cast<int>(rank);
    line.for_slowest_ns = waited;
  }
  return line;
}

std::vector<CommLog::Line> CommLog::lines() const {
  const std::scoped_lock lock(mutex_);
  std::vector<Line> lines;
  lines.reserve(sums_.size());
  for (const auto& [key, sums] : sums_) lines.push_back(line_of(key, *sums));
  return lines;
}

}  // namespace dreamcomm
