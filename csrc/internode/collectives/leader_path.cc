#include "internode/collectives/leader_path.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "algorithms/primitives.h"
#include "algorithms/signature.h"
#include "core/error.h"
#include "internode/collectives/two_step_reduction.h"

namespace dreamcomm {
namespace {

/// all_reduce and reduce of few bytes: the ranks of a host give them to their leader, and the
/// leaders to each other.
LeaderPayload small_reduction(HierContext& context, const Request& request) {
  const TwoStepReduction steps(request.reduction, context.widens_halves());
  const std::size_t count = request.in[0].bytes / steps.item();
  LeaderPayload payload;
  payload.brought = count * steps.wire_item();
  payload.told = request.in[0].bytes;
  payload.bring = [&context, &request, steps, count](std::byte* bytes) {
    const Cargo wide = context.widened(steps, request.in[0].data, count);
    const Block in{wide.data(), count * steps.wire_item()};
    const Block out{bytes, in.bytes};
    context.run_on_host(Kind::kReduce, steps.here, {&in, 1},
                        {&out, context.index() == 0 ? 1U : 0U});
  };
  payload.decide = [&context, steps, count](std::span<const std::byte* const> brought,
                                            std::byte* told) {
    context.combine(steps, brought, told, count);
  };
  payload.take = [&request](const std::byte* told) {
    if (!request.out.empty()) copy_bytes(request.out[0].data, told, request.out[0].bytes);
    return std::nullopt;
  };
  return payload;
}

/// A broadcast of few bytes.
LeaderPayload small_broadcast(HierContext& context, const Request& request) {
  const std::size_t bytes = request.out[0].bytes;
  const int home = context.topology().host_of(request.root);
  LeaderPayload payload;
  payload.brought = payload.told = bytes;
  payload.bring = [&context, &request, home, bytes](std::byte* brought) {
    if (context.host() != home) return;
    const Block out{brought, bytes};
    context.run_on_host(Kind::kBroadcast, request.reduction, request.in, {&out, 1},
                        context.topology().index_of(request.root));
  };
  payload.decide = [home, bytes](std::span<const std::byte* const> brought, std::byte* told) {
    copy_bytes(told, brought[static_cast<std::size_t>(home)], bytes);
  };
  payload.take = [&request, bytes](const std::byte* told) {
    copy_bytes(request.out[0].data, told, bytes);
    return std::nullopt;
  };
  return payload;
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

std::optional<Mismatch> objection_to(const Table& table, int size) {
  for (int giver = 0; giver < size; ++giver) {
    for (int taker = 0; taker < size; ++taker) {
      const std::uint64_t given = table.given(giver, taker);
      const std::uint64_t expected = table.expected(taker, giver);
      if (given == expected) continue;
      return Mismatch{concat("rank ", giver, " gives rank ", taker, ' ', given, " bytes, and rank ",
                             taker, " expects ", expected),
                      giver, taker};
    }
  }
  return std::nullopt;
}

LeaderPayload sizes_of_all_to_all(HierContext& context, const Request& request) {
  const std::size_t row = table_bytes(context.size());
  LeaderPayload payload;
  payload.brought = host_table_bytes(context.topology());
  payload.told = static_cast<std::size_t>(context.size()) * row;
  payload.bring = [&context, &request, row](std::byte* brought) {
    std::vector<std::uint64_t> own;
    for (const Block& block : request.in) own.push_back(block.bytes);
    for (const Block& block : request.out) own.push_back(block.bytes);
    const Block in{reinterpret_cast<std::byte*>(own.data()), row};
    std::vector<Block> out;
    for (int i = 0; i < context.ranks_here(); ++i) {
      out.push_back({brought + static_cast<std::size_t>(i) * row, row});
    }
    context.run_on_host(Kind::kAllGather, Reduction{}, {&in, 1}, out);
  };
  payload.decide = [&context, row](std::span<const std::byte* const> brought, std::byte* told) {
    for (int rank = 0; rank < context.size(); ++rank) {
      const std::byte* from = brought[static_cast<std::size_t>(context.topology().host_of(rank))];
      copy_bytes(told + static_cast<std::size_t>(rank) * row,
                 from + static_cast<std::size_t>(context.topology().index_of(rank)) * row, row);
    }
  };
  payload.take = [&context](const std::byte* told) {
    return objection_to(Table(told, context.size()), context.size());
  };
  return payload;
}

}  // namespace

std::size_t host_table_bytes(const Topology& topology) {
  int most = 0;
  for (int host = 0; host < topology.hosts(); ++host) {
    most = std::max(most, topology.ranks_on(host));
  }
  return static_cast<std::size_t>(most) * table_bytes(topology.size());
}

std::size_t wire_bytes(const Request& request, bool widens) {
  const TwoStepReduction steps(request.reduction, widens);
  return block_bytes(request) / steps.item() * steps.wire_item();
}

LeaderPayload opening_part(HierContext& context, const Request& request, bool leaders) {
  if (request.kind == Kind::kAllToAll) return sizes_of_all_to_all(context, request);
  if (!leaders) return {};
  switch (request.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce:
      return small_reduction(context, request);
    case Kind::kBroadcast:
      return small_broadcast(context, request);
    default:
      return {};
  }
}

}  // namespace dreamcomm
