#include "internode/tuning/timed_calls.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <vector>

namespace dreamcomm {
namespace {

constexpr std::size_t kBursts = 3;
constexpr std::size_t kLeast = 3;  // calls of a burst
constexpr std::size_t kMost = 16;
constexpr double kBurst = 0.008;                   // seconds
constexpr double kLong = 0.05;                     // of a call that is timed alone
constexpr std::chrono::microseconds kBetween{90};  // of a caller in Python, its caches cold
constexpr std::size_t kBytes = std::size_t{4} << 20;

using Times = std::array<double, kBursts>;

double median(Times values) {
  std::sort(values.begin(), values.end());
  return values[kBursts / 2];
}

/// Calls in a row. While they are of few bytes, each uses another tensor, and all tensors are
/// written again before a burst. A buffer that the last call has left in all caches would be faster
/// than the tensors that training reduces.
class Caller {
 public:
  Caller(const InStep& ranks, std::size_t bytes, const Way& way, Clock::time_point deadline)
      : ranks_(ranks),
        way_(way),
        bytes_(bytes),
        tensors_(std::clamp<std::size_t>(kBytes / std::max<std::size_t>(bytes, 1), 1, kMost)),
        data_(tensors_ * (bytes / sizeof(float))) {
    barrier_.deadline = request_.deadline = deadline;
    if (bytes == 0) return;
    request_.kind = Kind::kAllReduce;
    request_.reduction = {.dtype = DType::kFloat32, .op = ReduceOp::kSum};
    request_.in = request_.out = {&block_, 1};
  }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  /// Seconds of so many calls.
  double burst(std::size_t calls) {
    std::fill(data_.begin(), data_.end(), 0.0F);
    ranks_.run(barrier_, {.leaders = true});
    const Clock::time_point begin = Clock::now();
    for (std::size_t i = 0; i < calls; ++i) {
      const std::size_t offset = i % tensors_ * (bytes_ / sizeof(float));
      block_ = {reinterpret_cast<std::byte*>(data_.data() + offset), bytes_};
      const Clock::time_point ready = Clock::now() + kBetween;
      while (Clock::now() < ready) continue;
      ranks_.run(request_, way_);
    }
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

 private:
  const InStep& ranks_;
  const Way way_;
  const std::size_t bytes_;
  const std::size_t tensors_;
  std::vector<float> data_;
  Block block_;
  Request request_;
  Request barrier_;
};

}  // namespace

/// Times short calls in a few bursts, as the time beyond bursts of one call: an idle link lets some
/// bytes through at once, and ranks do not begin together.
double time_of_calls(const InStep& ranks, std::size_t bytes, const Way& way,
                     Clock::time_point deadline) {
  Caller caller(ranks, bytes, way, deadline);
  caller.burst(1);
  const double one = ranks.slowest(caller.burst(1));
  if (one > kLong) return one;
  const auto calls = static_cast<std::size_t>(std::clamp(kBurst / one, 1.0 * kLeast, 1.0 * kMost));
  Times all;
  Times firsts;
  for (std::size_t i = 0; i < kBursts; ++i) {
    all[i] = caller.burst(calls);
    firsts[i] = caller.burst(1);
  }
  const double whole = median(all) / static_cast<double>(calls);
  const double beyond = (median(all) - median(firsts)) / static_cast<double>(calls - 1);
  return std::max(beyond, whole / 2);  // slow single calls do not make the others cheaper
}

}  // namespace dreamcomm
