// The predicted time of calls between hosts, and the measurements behind it.
#include "internode/cost/model.h"

#include <doctest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "core/types.h"
#include "internode/tuning/measure.h"

namespace dreamcomm {
namespace {

/// The model's times with these costs, as trials; with disturbances if `disturbed`.
Trials trials_of(const LevelCosts& costs, const Shape& shape, double bucket,
                 const std::function<double(std::size_t bytes)>& disturbed) {
  const auto calls = [=](std::size_t bytes, const Way& way) {
    const Kind kind = bytes == 0 ? Kind::kBarrier : Kind::kAllReduce;
    const double seconds = predict(kind, bytes, way, shape, costs);
    // A shaped link lets through what it has not used before: calls in a row hide their waits.
    const double sent = 2.0 * (shape.hosts - 1) / shape.hosts * static_cast<double>(bytes);
    const double hidden = std::min(sent, bucket) * costs.between.byte;
    return std::max(seconds - hidden, sent * costs.between.byte) + disturbed(bytes);
  };
  const auto messages = [=](const Burst& burst) {
    const WireCosts& wire = costs.between;
    return wire.latency + (burst.messages - 1) * wire.message +
           static_cast<double>(burst.bytes) * wire.byte * (burst.all ? shape.carriers : 1);
  };
  return {messages, calls, {}};
}

TEST_CASE("measured hosts are predicted as they were measured") {
  LevelCosts gigabit;
  gigabit.between = {60e-6, 20e-6, 8e-9, 8e-9, 100e-6, 0, 1, {}, {}};
  LevelCosts far = gigabit;
  far.between.latency = 0.1;
  LevelCosts shared = gigabit;  // the wire's processors are the ranks'
  shared.between.byte = shared.between.alone = 0.6e-9;
  shared.between.overlap = 0.2;
  LevelCosts busy = shared;
  busy.between.handling = 0.8e-9;
  const std::array links{std::pair{gigabit, 0.0}, std::pair{gigabit, 256.0 * 1024},
                         std::pair{far, 0.0}, std::pair{shared, 0.0}, std::pair{busy, 0.0}};
  for (const auto& [link, bucket] : links) {
    for (const Shape& shape : {Shape(std::vector{2, 2}), Shape(std::vector{1, 1, 1, 2})}) {
      const Trials trials = trials_of(link, shape, bucket, [](std::size_t) { return 0.0; });
      const LevelCosts found{link.here, measure_wire(trials, shape, link.here)};
      CAPTURE(bucket);
      CAPTURE(shape.hosts);
      for (std::size_t bytes = 1024; bytes <= std::size_t{64} << 20; bytes *= 2) {
        for (const Way& way : ways(Kind::kAllReduce, bytes, shape, found)) {
          CAPTURE(bytes);
          CAPTURE(way.leaders);
          CAPTURE(way.chunk);
          const double ratio = way.seconds / trials.calls(bytes, way);
          CHECK(ratio > 0.85);
          CHECK(ratio < 1.3);  // 8 and 32 KiB are between the sizes that were measured
        }
      }
    }
  }
}

TEST_CASE("a disturbance during the measurement does not change the way of calls") {
  const LevelCosts plain;
  const Shape shape(std::vector{2, 2});
  const auto hiccup = [](std::size_t bytes) { return bytes == 16 << 10 ? 0.1 : 0.0; };
  const Trials trials = trials_of(plain, shape, 0, hiccup);
  const LevelCosts found{plain.here, measure_wire(trials, shape, plain.here)};
  const double most = trials.calls(64 << 10, {.leaders = true});
  CHECK(predict(Kind::kAllReduce, 16 << 10, {.leaders = true}, shape, found) <= 1.3 * most);
}

TEST_CASE("if trials take long, no more are made than needed") {
  const LevelCosts plain;
  const Shape shape(std::vector{2, 2});
  Trials trials = trials_of(plain, shape, 0, [](std::size_t) { return 0.0; });
  int made = 0;
  const auto count = [&made](auto trial) {
    return [&made, trial](const auto&... what) {
      ++made;
      return trial(what...);
    };
  };
  trials.messages = count(trials.messages);
  trials.calls = count(trials.calls);
  measure_wire(trials, shape, plain.here);
  const int all = std::exchange(made, 0);
  trials.spent = [] { return 3.0; };
  const LevelCosts found{plain.here, measure_wire(trials, shape, plain.here)};
  CHECK(made < all / 2);
  for (const std::size_t bytes : {std::size_t{1} << 10, std::size_t{64} << 20}) {
    for (const Way& way : ways(Kind::kAllReduce, bytes, shape, found)) {
      CHECK(way.seconds > 0);
      CHECK(way.seconds < 10);
    }
  }
}

TEST_CASE("another way than by leaders must take clearly less time") {
  const Shape shape(std::vector{2, 2});
  LevelCosts costs;
  const std::size_t bytes = 64 << 10;
  const double leaders = predict(Kind::kAllReduce, bytes, {.leaders = true}, shape, costs);
  const double carriers = predict(Kind::kAllReduce, bytes, {.chunk = 512 << 10}, shape, costs);
  costs.between.by_carriers.factors.fill(0.98 * leaders / carriers);
  CHECK(best_way(Kind::kAllReduce, bytes, shape, costs).leaders);
  costs.between.by_carriers.factors.fill(0.94 * leaders / carriers);
  CHECK(!best_way(Kind::kAllReduce, bytes, shape, costs).leaders);
}

TEST_CASE("corrections are interpolated between the measured sizes") {
  Corrections corrections;
  corrections.factors = {3, 2, 4, 1, 1, 1, 1, 0.5};
  CHECK(corrections.at(0) == 3);
  CHECK(corrections.at(1024) == 2);
  CHECK(corrections.at((1024 + 4096) / 2.0) == 3);
  CHECK(corrections.at(4096) == 4);
  CHECK(corrections.at(100'000) == 1);
  CHECK(corrections.at(1e9) == 0.5);
}

Shape hosts_of(int hosts, int ranks_each) {
  return Shape(std::vector<int>(static_cast<std::size_t>(hosts), ranks_each));
}

TEST_CASE("the way of a call depends on the hosts") {
  const LevelCosts ethernet;
  const auto taken = [&](std::size_t bytes, const Shape& shape, const LevelCosts& costs) {
    return best_way(Kind::kAllReduce, bytes, shape, costs);
  };
  CHECK(taken(1024, hosts_of(2, 2), ethernet).leaders);
  CHECK(!taken(64 << 20, hosts_of(2, 2), ethernet).leaders);
  LevelCosts far = ethernet;
  far.between.latency = 5e-3;
  CHECK(
      taken(128 << 10, hosts_of(2, 2), far).leaders);  // otherwise ranks would wait two more times
  CHECK(!taken(128 << 10, hosts_of(64, 2), far).leaders);  // a leader would send 8 MB
  CHECK(best_way(Kind::kBarrier, 0, hosts_of(64, 8), far).leaders);

  // The wire bounds a large call: 2 (H - 1) / H of it leaves each host.
  const double bytes = 512 << 20;
  for (const int hosts : {2, 3, 8, 64}) {
    const double wire = 2.0 * (hosts - 1) / hosts * bytes * ethernet.between.byte;
    const double seconds = taken(512 << 20, hosts_of(hosts, 2), ethernet).seconds;
    CHECK(seconds >= wire);
    CHECK(seconds <= 1.2 * wire);
  }
  for (const Kind kind :
       {Kind::kBarrier, Kind::kBroadcast, Kind::kAllReduce, Kind::kReduce, Kind::kReduceScatter,
        Kind::kAllGather, Kind::kGather, Kind::kScatter, Kind::kAllToAll}) {
    for (const std::size_t size : {0U, 1U, 5000U, 3U << 20}) {
      for (const Way& way : ways(kind, size, hosts_of(3, 4), ethernet)) {
        CHECK(way.seconds > 0);
        CHECK((way.leaders || way.chunk > 0));
      }
    }
  }
}

TEST_CASE("the ways of a call between many hosts do not end before the best one") {
  const LevelCosts ethernet;
  for (const Kind kind : {Kind::kAllGather, Kind::kReduceScatter}) {
    const auto seconds = [&](std::size_t bytes) {
      return best_way(kind, bytes, hosts_of(64, 1), ethernet).seconds;
    };
    CHECK(seconds(4U << 20) <= seconds((4U << 20) + 4));
  }
}

}  // namespace
}  // namespace dreamcomm
