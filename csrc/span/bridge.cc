#include "span/bridge.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "algorithms/walk.h"
#include "comm/validate.h"
#include "core/error.h"
#include "span/opening.h"
#include "span/rows.h"
#include "span/steps.h"

namespace dreamcomm {
namespace {

Signature signature_of_whole(const Request& request, std::uint64_t number) {
  return signature_of(request, number, Signature::kNoRow);
}

/// all_reduce and reduce of little: the ranks of a host give it to their leader, the leaders to
/// each other.
Small small_reduction(Trip& trip, const Request& request, const Steps& steps) {
  const std::size_t count = request.in[0].bytes / steps.item();
  Small small;
  small.brought = count * steps.wire_item();
  small.told = request.in[0].bytes;
  small.bring = [&trip, &request, &steps, count](std::byte* bytes) {
    const Cargo wide = steps.widened(trip, request.in[0].data, count);
    const Block in{wide.data(), count * steps.wire_item()};
    const Block out{bytes, in.bytes};
    trip.here(Kind::kReduce, steps.here, {&in, 1}, {&out, trip.index() == 0 ? 1U : 0U});
  };
  small.judge = [&trip, &steps, count](std::span<const std::byte* const> brought, std::byte* told) {
    steps.combine(trip, brought, told, count);
  };
  small.take = [&request](const std::byte* told) {
    if (!request.out.empty()) copy_bytes(request.out[0].data, told, request.out[0].bytes);
    return std::nullopt;
  };
  return small;
}

/// A broadcast of little.
Small small_broadcast(Trip& trip, const Request& request) {
  const std::size_t bytes = request.out[0].bytes;
  const int home = trip.topology().host_of(request.root);
  Small small;
  small.brought = small.told = bytes;
  small.bring = [&trip, &request, home, bytes](std::byte* brought) {
    if (trip.host() != home) return;
    const Block out{brought, bytes};
    trip.here(Kind::kBroadcast, request.reduction, request.in, {&out, 1},
              trip.topology().index_of(request.root));
  };
  small.judge = [home, bytes](std::span<const std::byte* const> brought, std::byte* told) {
    copy_bytes(told, brought[static_cast<std::size_t>(home)], bytes);
  };
  small.take = [&request, bytes](const std::byte* told) {
    copy_bytes(request.out[0].data, told, bytes);
    return std::nullopt;
  };
  return small;
}

/// The sizes of all blocks of an all_to_all, which may differ.
class Table {
 public:
  Table(const std::byte* told, int size) : told_(told), size_(static_cast<std::size_t>(size)) {}
  std::uint64_t given(int rank, int to) const { return entry(rank, static_cast<std::size_t>(to)); }
  std::uint64_t expected(int rank, int from) const {
    return entry(rank, size_ + static_cast<std::size_t>(from));
  }

 private:
  std::uint64_t entry(int rank, std::size_t column) const {
    std::uint64_t value = 0;
    const std::size_t place = static_cast<std::size_t>(rank) * 2 * size_ + column;
    std::memcpy(&value, told_ + place * sizeof value, sizeof value);
    return value;
  }

  const std::byte* told_;
  const std::size_t size_;
};

std::optional<Objection> objection_to(const Table& table, int size) {
  for (int giver = 0; giver < size; ++giver) {
    for (int taker = 0; taker < size; ++taker) {
      const std::uint64_t given = table.given(giver, taker);
      const std::uint64_t expected = table.expected(taker, giver);
      if (given == expected) continue;
      return Objection{concat("in all_to_all rank ", giver, " gives rank ", taker, ' ', given,
                              " bytes, and rank ", taker, " expects ", expected),
                       giver, taker};
    }
  }
  return std::nullopt;
}

Small sizes_of_all_to_all(Trip& trip, const Request& request) {
  const std::size_t row = table_bytes(trip.size());
  std::size_t most = 0;
  for (int host = 0; host < trip.hosts(); ++host) {
    most = std::max(most, static_cast<std::size_t>(trip.topology().ranks_on(host)) * row);
  }
  Small small;
  small.brought = most;
  small.told = static_cast<std::size_t>(trip.size()) * row;
  small.bring = [&trip, &request, row](std::byte* brought) {
    std::vector<std::uint64_t> own;
    for (const Block& block : request.in) own.push_back(block.bytes);
    for (const Block& block : request.out) own.push_back(block.bytes);
    const Block in{reinterpret_cast<std::byte*>(own.data()), row};
    std::vector<Block> out;
    for (int i = 0; i < trip.ranks_here(); ++i) {
      out.push_back({brought + static_cast<std::size_t>(i) * row, row});
    }
    trip.here(Kind::kAllGather, Reduction{}, {&in, 1}, out);
  };
  small.judge = [&trip, row](std::span<const std::byte* const> brought, std::byte* told) {
    for (int rank = 0; rank < trip.size(); ++rank) {
      const std::byte* from = brought[static_cast<std::size_t>(trip.topology().host_of(rank))];
      copy_bytes(told + static_cast<std::size_t>(rank) * row,
                 from + static_cast<std::size_t>(trip.topology().index_of(rank)) * row, row);
    }
  };
  small.take = [&trip](const std::byte* told) {
    return objection_to(Table(told, trip.size()), trip.size());
  };
  return small;
}

bool is_small(const Request& request) {
  const Steps steps(request.reduction);
  switch (request.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce:
      return request.in[0].bytes / steps.item() * steps.wire_item() <= kSmall;
    case Kind::kBroadcast:
      return request.out[0].bytes <= kSmall;
    default:
      return request.kind == Kind::kBarrier;
  }
}

void run_large(Trip& trip, const Request& request) {
  switch (request.kind) {
    case Kind::kAllReduce:
      return spans::all_reduce(trip, request);
    case Kind::kReduce:
      return spans::reduce(trip, request);
    case Kind::kReduceScatter:
      return spans::reduce_scatter(trip, request);
    case Kind::kAllGather:
      return spans::all_gather(trip, request);
    case Kind::kBroadcast:
      return spans::broadcast(trip, request);
    case Kind::kGather:
      return spans::gather(trip, request);
    case Kind::kScatter:
      return spans::scatter(trip, request);
    case Kind::kAllToAll:
      return spans::all_to_all(trip, request);
    default:
      return;
  }
}

}  // namespace

Bridge::Bridge(Communicator& host, Topology topology, int rank, std::unique_ptr<Link> link,
               BridgeOptions options)
    : host_(host),
      topology_(std::move(topology)),
      rank_(rank),
      link_(std::move(link)),
      options_(std::move(options)),
      levels_{host_, topology_,           *link_, nudger_, options_.heap, spoilt_, options_.told,
              rank_, options_.chunk_bytes} {}

Bridge::~Bridge() { close(); }

/// The ranks of this host are told first, then the others, who look for it when the link ends.
void Bridge::give_up(const std::string& reason) {
  host_.abort(reason);
  if (told_.take() == 0 && options_.tell) options_.tell(reason);
  close();
}

void Bridge::close() {
  link_->close();
  nudger_.nudge();
}

void Bridge::run_ordered(const Request& request, const Interrupt& interrupt) {
  validate(request, rank_, topology_.size());
  Trip trip(levels_, request, calls_, interrupt);
  ++calls_;
  try {
    run(trip, request);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kMismatch) throw;
    const std::string call = dreamcomm::describe(request);
    const std::string what = error.what();
    const std::string reason = what.starts_with(call) ? what : concat(call, ": ", what);
    give_up(reason);
    throw Error(error.kind(), reason);
  } catch (...) {
    give_up(concat(dreamcomm::describe(request), " was interrupted on rank ", rank_));
    throw;
  }
  const auto kind = static_cast<std::size_t>(request.kind);
  sent_[kind].grow(static_cast<std::int64_t>(trip.traffic().sent));
  received_[kind].grow(static_cast<std::int64_t>(trip.traffic().received));
}

void Bridge::run(Trip& trip, const Request& request) {
  const Signature signature = signature_of_whole(request, calls_);
  const Steps steps(request.reduction);
  const bool small = is_small(request);
  Small part;
  if (small && (request.kind == Kind::kAllReduce || request.kind == Kind::kReduce)) {
    part = small_reduction(trip, request, steps);
  } else if (small && request.kind == Kind::kBroadcast) {
    part = small_broadcast(trip, request);
  } else if (request.kind == Kind::kAllToAll) {
    part = sizes_of_all_to_all(trip, request);
  }
  open(trip, signature, options_.call_site, part);
  if (!small) run_large(trip, request);
}

std::string Bridge::describe() const {
  return concat(topology_.hosts(), " hosts: ", topology_.words(), "; between them ",
                link_->describe());
}

std::string Bridge::explain(Kind kind, std::size_t bytes) const {
  const bool few = bytes <= kSmall && (kind == Kind::kAllReduce || kind == Kind::kReduce ||
                                       kind == Kind::kBroadcast || kind == Kind::kBarrier);
  const std::string way =
      few ? "one leader per host exchanges it, whole, as the call opens"
          : concat(topology_.carriers(), " of the ranks of each host carry a share between hosts");
  return concat(name(kind), " of ", bytes, " bytes: hierarchical: ", way, "\n  (", describe(), ')');
}

std::array<WireTraffic, kKinds> Bridge::traffic() const {
  std::array<WireTraffic, kKinds> all;
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = {static_cast<std::uint64_t>(sent_[i].read()),
              static_cast<std::uint64_t>(received_[i].read())};
  }
  return all;
}

}  // namespace dreamcomm
