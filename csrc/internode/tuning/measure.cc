#include "internode/tuning/measure.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

namespace dreamcomm {
namespace {

constexpr int kRounds = 6;
constexpr int kMany = 16;  // messages

/// A slow link is measured with few bytes, a fast one with many.
constexpr std::array<std::size_t, 4> kSizes{std::size_t{16} << 10, std::size_t{256} << 10,
                                            std::size_t{1} << 20, std::size_t{4} << 20};
constexpr double kEnough = 0.008;  // seconds of sending, after which nothing larger is tried

constexpr double kPatience = 2;  // seconds of all trials

constexpr double kNoise = 1.25;  // how much longer a call may take than a larger one

bool is_long(const Trials& trials) { return trials.spent && trials.spent() > kPatience; }

using WayOf = std::function<Way(std::size_t bytes)>;

/// Sets `value`, up to 1, so that `predicted()`, which grows with it, equals `seconds`, or is as
/// near as possible.
template <typename Predicted>
void fit(double& value, double seconds, Predicted&& predicted) {
  constexpr double kLeast = 1e-13;
  constexpr double kMost = 1.0;
  double low = kLeast;
  double high = kMost;
  while (high > low * 1.001) {
    value = low + (high - low) / 2;
    (predicted() < seconds ? low : high) = value;
  }
}

/// Seconds per byte that a host sends, from the time of each size beyond that of the one before.
/// Bytes that arrive at once, as on a shaped link, are in both.
double per_byte(const Trials& trials, int senders, double empty) {
  double before = empty;
  std::size_t smaller = 0;
  double rate = 0;
  for (const std::size_t bytes : kSizes) {
    const double seconds = trials.messages({1, bytes, true});
    const double whole = std::max(seconds - empty, 1e-9) / static_cast<double>(bytes);
    const double beyond = (seconds - before) / static_cast<double>(bytes - smaller);
    rate = std::max(beyond, whole / 2) / senders;
    before = seconds;
    smaller = bytes;
    if (seconds - empty > std::max(kEnough, empty / 2) || is_long(trials)) break;
  }
  return rate;
}

struct Tried {
  std::size_t at;  // of Corrections::kSizes
  double seconds;
};

/// Times calls of growing size, until their bytes take long at a host's rate of `byte` seconds
/// each.
std::vector<Tried> try_sizes(const Trials& trials, std::size_t most, const WayOf& way,
                             double byte) {
  constexpr std::size_t kFar = 3;  // sizes per step if even a call of no bytes takes long
  std::vector<Tried> tried;
  std::size_t at = 0;
  while (at < Corrections::kSizes.size() && Corrections::kSizes[at] <= most) {
    const std::size_t bytes = Corrections::kSizes[at];
    tried.push_back({at, trials.calls(bytes, way(bytes))});
    const double empty = tried.front().seconds;
    if (static_cast<double>(bytes) * byte > std::max(kEnough, empty / 2)) break;
    if (is_long(trials)) break;
    at += empty > kEnough ? kFar : 1;
  }
  return tried;
}

/// The model's time for a tried size.
using Predicted = std::function<double(std::size_t at)>;

/// Returns the factors for the model's times at the tried sizes. For larger sizes the bytes
/// dominate, and those were fitted.
Corrections correct(const std::vector<Tried>& tried, const Predicted& predicted) {
  Corrections found;
  double larger = tried.back().seconds;
  for (std::size_t i = tried.size(); i-- > 0;) {
    larger =
        std::min(tried[i].seconds, kNoise * larger);  // far longer than a larger one: a disturbance
    const double factor = larger / predicted(tried[i].at);
    const std::size_t begin = i == 0 ? 0 : tried[i - 1].at + 1;
    std::fill(&found.factors[begin], &found.factors[tried[i].at] + 1, factor);
  }
  return found;
}

/// Fits the time of the ranks for a chunk and for each of its bytes. It uses the time beyond the
/// model's of the two largest tried sizes that are one chunk each. If all of it were the chunk's,
/// the model would find large calls too quick, and large chunks too good.
void fit_ranks(const std::vector<Tried>& tried, const Predicted& predicted, const Shape& shape,
               WireCosts& wire) {
  wire.chunk = wire.handling = 0;
  const auto beyond = [&](const Tried& one) { return one.seconds - predicted(one.at); };
  const auto sent = [&](const Tried& one) {
    const auto bytes = static_cast<double>(Corrections::kSizes[one.at]);
    return 2.0 * (shape.hosts - 1) / shape.hosts * bytes;
  };
  const Tried& largest = tried.back();
  if (largest.at == 0) return;
  const double most = std::max(beyond(largest), 0.0);
  const Tried& smaller = tried[tried.size() - 2];
  if (smaller.at > 0) {  // otherwise it was a barrier, which has no chunk
    const double slope = (most - beyond(smaller)) / (sent(largest) - sent(smaller));
    wire.handling = std::clamp(slope, 0.0, most / sent(largest));
  }
  wire.chunk = std::max(most - wire.handling * sent(largest), 0.0);
}

Predicted prediction(const WayOf& way, const Shape& shape, const LevelCosts& costs) {
  return [&costs, shape, way](std::size_t at) {
    const std::size_t bytes = Corrections::kSizes[at];
    const Kind kind = bytes == 0 ? Kind::kBarrier : Kind::kAllReduce;
    return predict(kind, bytes, way(bytes), shape, costs);
  };
}

Corrections calibrate_leaders(const Trials& trials, const Shape& shape, LevelCosts& costs) {
  const WayOf way = [](std::size_t) { return Way{.leaders = true}; };
  const std::vector<Tried> tried =
      try_sizes(trials, most_brought(shape.hosts), way, costs.between.byte);
  const Predicted predicted = prediction(way, shape, costs);
  const Tried& largest = tried.back();
  costs.between.alone = costs.between.byte;
  if (largest.at > 0) {
    fit(costs.between.alone, largest.seconds, [&] { return predicted(largest.at); });
  }
  return correct(tried, predicted);
}

Corrections calibrate_carriers(const Trials& trials, const Shape& shape, LevelCosts& costs) {
  const WayOf way = [](std::size_t bytes) {
    return bytes == 0 ? Way{.leaders = true} : Way{.chunk = bytes};
  };
  const std::vector<Tried> tried =
      try_sizes(trials, Corrections::kSizes.back(), way, costs.between.byte);
  const Predicted predicted = prediction(way, shape, costs);
  fit_ranks(tried, predicted, shape, costs.between);
  return correct(tried, predicted);
}

/// Fits how much of the chunks of a large call overlaps, with one call of a few chunks: its bytes
/// in one chunk have been timed. On a slow link the wire's part is nearly all, and the shorter part
/// does not matter. On a link where even a barrier takes long, that size was not tried.
void fit_overlap(const Trials& trials, double barrier, const Shape& shape, LevelCosts& costs) {
  constexpr std::size_t kBytes = Corrections::kSizes.back();
  constexpr Way kWay{.chunk = kBytes / 4};
  const double sent = 2.0 * (shape.hosts - 1) / shape.hosts * static_cast<double>(kBytes);
  if (sent * costs.between.byte > kEnough || barrier > kEnough || is_long(trials)) return;
  double apart = 0;
  fit(apart, trials.calls(kBytes, kWay), [&] {
    costs.between.overlap = 1 - apart;
    return predict(Kind::kAllReduce, kBytes, kWay, shape, costs);
  });
}

}  // namespace

double time_of_messages(HierContext& context, const Burst& burst) {
  const bool takes_part = burst.all ? context.carries() : context.index() == 0;
  if (!burst.all && !takes_part) return 0;
  const int hosts = context.hosts();
  const int next = takes_part ? context.partner((context.host() + 1) % hosts) : -1;
  const int before = takes_part ? context.partner((context.host() + hosts - 1) % hosts) : -1;
  const Cargo out = context.allocate(burst.bytes);
  const Cargo in = context.allocate(burst.bytes * static_cast<std::size_t>(burst.messages));
  std::vector<double> seconds;
  for (int round = 0; round < kRounds; ++round) {
    // All ranks begin together; otherwise each would find the host's link idle.
    if (burst.all) context.run_on_host(Kind::kBarrier, {}, {}, {});
    if (!takes_part) continue;
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < burst.messages; ++i) {
      const auto number = static_cast<std::uint32_t>(round * burst.messages + i);
      const std::size_t offset = in.offset + static_cast<std::size_t>(i) * burst.bytes;
      context.receive(before, {in.memory, offset, burst.bytes}, number);
      context.send(next, out, number);
    }
    context.wait(context.receives());
    context.wait(context.sends());
    // The first round finds the link idle: a shaped link lets some bytes through at once then.
    if (round > 0) seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return takes_part ? seconds[seconds.size() / 2] : 0;
}

WireCosts measure_wire(const Trials& trials, const Shape& shape, const Costs& here) {
  LevelCosts costs{here, {}};
  WireCosts& wire = costs.between;
  const double one = trials.messages({});
  wire.message = std::max(trials.messages({kMany, 1, false}) - one, 0.0) / (kMany - 1);
  wire.byte = per_byte(trials, shape.carriers, one);
  wire.latency = one;
  wire.alone = wire.byte;
  if (is_long(trials)) return wire;
  const Way leaders{.leaders = true};
  const double barrier = trials.calls(0, leaders);
  fit(wire.latency, barrier, [&] { return predict(Kind::kBarrier, 0, leaders, shape, costs); });
  if (is_long(trials)) return wire;
  const Corrections of_leaders = calibrate_leaders(trials, shape, costs);
  // Measuring only one way would make the model prefer the other.
  const Corrections of_carriers =
      is_long(trials) ? of_leaders : calibrate_carriers(trials, shape, costs);
  wire.by_leaders = of_leaders;
  wire.by_carriers = of_carriers;
  fit_overlap(trials, barrier, shape, costs);
  return wire;
}

}  // namespace dreamcomm
