#include "internode/cost/model.h"

#include <algorithm>
#include <array>
#include <iomanip>
#include <numeric>
#include <sstream>

#include "algorithms/signature.h"
#include "algorithms/table.h"

namespace dreamcomm {
namespace {

constexpr std::size_t kPage = std::size_t{256} << 10;  // of a rank: staged calls go through it
constexpr std::array<std::size_t, 5> kChunks{std::size_t{512} << 10, std::size_t{1} << 20,
                                             std::size_t{2} << 20, std::size_t{4} << 20,
                                             std::size_t{8} << 20};
constexpr double kAsks =
    1;  // the sender of a first chunk is informed of its receive before it sends
constexpr std::size_t kOfAllToAll = kChunks[1];

/// The load of a chunk, except its opening.
struct Load {
  double here = 0;      // seconds of the ranks of a host
  double wire = 0;      // bytes that the busiest host sends, or receives
  double messages = 0;  // of a rank
  double in_a_row = 1;  // messages that each wait for the one before
};

class Model {
 public:
  Model(Kind kind, std::size_t bytes, const Shape& shape, const LevelCosts& costs)
      : kind_(kind), bytes_(bytes), shape_(shape), costs_(costs), others_(shape.hosts - 1) {}

  /// Seconds to open a call: signatures and `brought` bytes from each host, `told` bytes to all.
  double opening(double brought, double told) const {
    constexpr double kHead = sizeof(Signature) + 8;
    return here(Kind::kAllGather, sizeof(Signature)) +
           exchange(others_, others_ * (kHead + brought), costs_.between.alone) +
           here(Kind::kBroadcast, 64 + told);
  }

  double within() const { return here(kind_, static_cast<double>(bytes_)); }

  double by_leaders() const {
    const auto size = static_cast<double>(bytes_);
    const bool adds = kind_ == Kind::kAllReduce || kind_ == Kind::kReduce;
    const double seconds = opening(size, size) + (adds ? here(Kind::kReduce, size) : 0) +
                           (kind_ == Kind::kBroadcast ? here(Kind::kBroadcast, size) : 0);
    return seconds * costs_.between.by_leaders.at(size);
  }

  double by_carriers(std::size_t chunk) const {
    const bool table = kind_ == Kind::kAllToAll;
    const double row = 16.0 * shape_.size;
    const double begin = table ? opening(shape_.ranks * row, shape_.size * row) : opening(0, 0);
    if (bytes_ == 0) return begin;
    const auto whole = static_cast<double>(bytes_);
    const double part = std::min(whole, static_cast<double>(chunk));
    const double count = whole / part;
    const double before = moves_first() ? here(kind_, whole * shape_.ranks / shape_.size) : 0;
    const Load load = load_of(part);
    const double wire = load.wire * costs_.between.byte + load.messages * costs_.between.message;
    // The time of the ranks while the wire is busy.
    const double ranks = load.here + costs_.between.chunk + load.wire * costs_.between.handling;
    // The longer of both is busy all the time. The other's first or last chunk is not hidden, and
    // neither is the time in which both need the same processors.
    const double shown = 1 + (count - 1) * (1 - costs_.between.overlap);
    const double seconds = begin + before + count * std::max(ranks, wire) +
                           shown * std::min(ranks, wire) +
                           (kAsks + load.in_a_row) * costs_.between.latency;
    return seconds * costs_.between.by_carriers.at(reduced_by(count * load.wire));
  }

 private:
  /// Bytes of an all_reduce in which the busiest host sends `sent` bytes.
  double reduced_by(double sent) const { return sent * shape_.hosts / (2.0 * others_); }

  /// True if bytes that stay within the host move before the rest is sent.
  bool moves_first() const {
    return kind_ == Kind::kGather || kind_ == Kind::kScatter || kind_ == Kind::kAllToAll;
  }

  double exchange(double messages, double bytes, double per_byte) const {
    return costs_.between.latency + messages * costs_.between.message + bytes * per_byte;
  }

  double here(Kind kind, double bytes) const {
    if (shape_.ranks == 1) return 0;
    const bool adds =
        kind == Kind::kReduce || kind == Kind::kReduceScatter || kind == Kind::kAllReduce;
    const ReduceOp op = adds ? ReduceOp::kSum : ReduceOp::kNone;
    const CallShape call{kind, op, static_cast<std::size_t>(bytes), shape_.ranks, kPage};
    const Preference preference{.costs = &costs_.here};
    return predict(algorithm_table()[pick(call, preference)], call, costs_.here);
  }

  Load load_of(double part) const {
    const double hosts = shape_.hosts;
    const double ranks = shape_.ranks;
    const double others = shape_.size - ranks;  // ranks of other hosts
    switch (kind_) {
      case Kind::kAllReduce:
        return {here(Kind::kReduceScatter, part / ranks) + here(Kind::kAllGather, part / ranks),
                2 * part * others_ / hosts, 2.0 * others_, 2};
      case Kind::kReduce:
        return {here(Kind::kReduce, part) + here(Kind::kBroadcast, part), part * others_,
                static_cast<double>(others_)};
      case Kind::kBroadcast:
        return {here(Kind::kBroadcast, part), part * others_, static_cast<double>(others_)};
      case Kind::kReduceScatter:
        return {shape_.size * here(Kind::kReduce, part), others * part,
                std::max(others / ranks, 1.0)};
      case Kind::kAllGather:
        return {here(Kind::kAllGather, part) + others * here(Kind::kBroadcast, part),
                std::max(others, others_ * ranks) * part, std::max(others / ranks, 1.0)};
      case Kind::kGather:
      case Kind::kScatter:
        return {0, others * part, others};
      case Kind::kAllToAll:
        return {0, others / shape_.size * ranks * part, others};
      default:
        return {};
    }
  }

  const Kind kind_;
  const std::size_t bytes_;
  const Shape& shape_;
  const LevelCosts& costs_;
  const int others_;  // hosts
};

bool may_go_by_leaders(Kind kind, std::size_t bytes, int hosts) {
  const bool fits = kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kBroadcast;
  return kind == Kind::kBarrier || (fits && bytes <= most_brought(hosts));
}

/// True if a rank takes a chunk from every other host at the same time: each is a share, so that
/// all together take no more room.
bool is_shared(Kind kind) { return kind == Kind::kAllGather || kind == Kind::kReduceScatter; }

constexpr std::size_t share_bytes(std::size_t bytes, int hosts) {
  constexpr std::size_t kLeast = std::size_t{64} << 10;
  return std::max(bytes / static_cast<std::size_t>(hosts - 1), kLeast);
}

}  // namespace

const WireCosts& WireCosts::fixed() {
  static constexpr WireCosts kCosts{40e-6, 10e-6, 1 / 1.1e9, 1 / 1.1e9, 50e-6, 0, 1, {}, {}};
  return kCosts;
}

std::string WireCosts::words() const {
  std::ostringstream text;
  const auto rate = [](double seconds_per_byte) {
    constexpr double kSlow = 10;
    const double megabytes = 1e-6 / seconds_per_byte;
    std::ostringstream words;
    words << std::fixed << std::setprecision(megabytes < kSlow ? 2 : 0) << megabytes << " MB/s";
    return words.str();
  };
  text << std::fixed << std::setprecision(0) << "latency " << latency * 1e6 << " us, "
       << message * 1e6 << " us for each further message, " << rate(alone)
       << " from one rank of a host, " << rate(byte) << " from all that carry, " << chunk * 1e6
       << " us for each of their chunks and " << handling * 1e9 << " us for each KB of it, "
       << overlap * 100 << " % of which overlap";
  return text.str();
}

Shape::Shape(std::span<const int> ranks_on_hosts)
    : hosts(static_cast<int>(ranks_on_hosts.size())),
      ranks(*std::max_element(ranks_on_hosts.begin(), ranks_on_hosts.end())),
      carriers(*std::min_element(ranks_on_hosts.begin(), ranks_on_hosts.end())),
      size(std::accumulate(ranks_on_hosts.begin(), ranks_on_hosts.end(), 0)) {}

std::size_t most_brought(int hosts) {
  constexpr std::size_t kMost = std::size_t{1} << 20;
  constexpr std::size_t kOfAll = std::size_t{4} << 20;
  return std::min(kMost, kOfAll / static_cast<std::size_t>(std::max(hosts - 1, 1)));
}

double predict(Kind kind, std::size_t bytes, const Way& way, const Shape& shape,
               const LevelCosts& costs) {
  const Model model(kind, bytes, shape, costs);
  if (shape.hosts == 1) return model.within();
  return way.leaders ? model.by_leaders() : model.by_carriers(way.chunk);
}

std::vector<Way> ways(Kind kind, std::size_t bytes, const Shape& shape, const LevelCosts& costs) {
  std::vector<Way> all;
  const auto add = [&](Way way) {
    way.seconds = predict(kind, bytes, way, shape, costs);
    all.push_back(way);
  };
  if (shape.hosts == 1) add({});
  if (shape.hosts == 1) return all;
  if (may_go_by_leaders(kind, bytes, shape.hosts)) add({.leaders = true});
  if (kind == Kind::kBarrier) return all;
  for (const std::size_t chunk : kChunks) {
    // The blocks of an all_to_all may differ, and with them each rank's choice.
    if (kind == Kind::kAllToAll && chunk != kOfAllToAll) continue;
    const std::size_t size = is_shared(kind) ? share_bytes(chunk, shape.hosts) : chunk;
    const bool is_new = all.empty() || size != all.back().chunk;  // with many hosts some are equal
    if (is_new) add({.chunk = size});
    if (bytes <= size) break;
  }
  return all;
}

double flat_ring(std::size_t bytes, const Shape& shape, const LevelCosts& costs) {
  const std::span<const Row> rows = algorithm_table();
  const auto ring = std::find_if(rows.begin(), rows.end(), [](const Row& row) {
    return row.kind == Kind::kAllReduce && row.name == "ring";
  });
  const CallShape call{Kind::kAllReduce, ReduceOp::kSum, bytes, shape.size, kPage};
  const double within = shape.size > 1 ? predict(*ring, call, costs.here) : 0;
  if (shape.hosts == 1) return within;
  const WireCosts& wire = costs.between;
  const double share = static_cast<double>(bytes) / shape.size;
  return std::max(within,
                  2.0 * (shape.size - 1) * (wire.latency + wire.message + share * wire.byte));
}

Way best_way(Kind kind, std::size_t bytes, const Shape& shape, const LevelCosts& costs) {
  constexpr double kClearly = 0.97;
  const std::vector<Way> all = ways(kind, bytes, shape, costs);
  const auto least = std::min_element(all.begin(), all.end(), [](const Way& one, const Way& other) {
    return one.seconds < other.seconds;
  });
  const Way& first = all.front();
  return first.leaders && least->seconds > kClearly * first.seconds ? first : *least;
}

}  // namespace dreamcomm
