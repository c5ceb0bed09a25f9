#include "algorithms/table.h"

#include <array>

#include "algorithms/rows.h"

namespace dreamcomm {
namespace {

bool always(const Call&) { return true; }

// Everyone reads everything: N x S to read instead of 2 x S, one wait instead of
// two. Worth it while the bytes cost less than a wait.
bool is_small(const Call& call) {
  constexpr std::size_t kWorthAWait = std::size_t{32} << 10;
  return call.bytes <= call.room && call.bytes * static_cast<std::size_t>(call.size) <= kWorthAWait;
}

// The ring passes partial results on, so each contribution must be scaled by its
// own rank exactly once; PREMUL_SUM scales where it adds.
bool ring_can(const Call& call) { return call.size > 1 && call.op != ReduceOp::kPremulSum; }

bool is_in_heap(const Call& call) { return call.in_heap; }
bool is_all_in_heap(const Call& call) { return call.in_heap && call.out_heap; }

constexpr std::string_view kRing =
    "each rank talks to its two neighbours only: 2(N-1)/N x S, in 2(N-1) waits a chunk";

constexpr std::array<Row, 19> kTable{{
    {Kind::kBarrier, "direct", true, always, rows::barrier, "one wait for all"},
    {Kind::kBroadcast, "heap", true, is_in_heap, rows::heap_broadcast,
     "the root's tensor, read in place"},
    {Kind::kBroadcast, "direct", true, always, rows::broadcast, "the root's page, read by all"},
    {Kind::kAllReduce, "heap", true, is_all_in_heap, rows::heap_reduce,
     "each rank reduces its shard of every tensor in place and writes it into all"},
    {Kind::kAllReduce, "one_shot", true, is_small, rows::one_shot,
     "small: every rank reduces everything itself, after one wait"},
    {Kind::kAllReduce, "direct", true, always, rows::direct_reduce,
     "each rank reduces its shard of every peer's data in rank order: 2(N-1)/N x S"},
    {Kind::kAllReduce, "ring", false, ring_can, rows::ring_all_reduce, kRing},
    {Kind::kAllReduce, "master", true, always, rows::master,
     "the textbook's master node: gather to rank 0, broadcast back, (N-1) x S each way"},
    {Kind::kReduce, "heap", true, is_all_in_heap, rows::heap_reduce,
     "each rank reduces its shard of every tensor in place and writes it into the root's"},
    {Kind::kReduce, "direct", true, always, rows::direct_reduce,
     "each rank reduces its shard in rank order, the root collects them"},
    {Kind::kAllGather, "heap", true, is_in_heap, rows::heap_all_gather,
     "each rank's tensor, read in place"},
    {Kind::kAllGather, "direct", true, always, rows::gather, "each rank's page, read by all"},
    {Kind::kAllGather, "ring", true, ring_can, rows::ring_all_gather,
     "each rank passes on what its left neighbour has: (N-1)/N x S"},
    {Kind::kGather, "direct", true, always, rows::gather, "each rank's page, read by the root"},
    {Kind::kScatter, "direct", true, always, rows::scatter, "the root's page, a piece for each"},
    {Kind::kReduceScatter, "heap", true, is_in_heap, rows::heap_reduce_scatter,
     "each rank reduces its block of every tensor in place"},
    {Kind::kReduceScatter, "direct", true, always, rows::direct_reduce_scatter,
     "each rank reduces its block of every peer's data in rank order: (N-1)/N x S"},
    {Kind::kReduceScatter, "ring", false, ring_can, rows::ring_reduce_scatter,
     "partial sums travel along the ring: (N-1)/N x S"},
    {Kind::kAllToAll, "direct", true, always, rows::all_to_all, "a piece of each page for each"},
}};

}  // namespace

std::span<const Row> algorithm_table() { return kTable; }

bool is_in_heaps(const Row& row) { return row.name == "heap"; }

// Below this the copy into a page costs less than another wait.
bool asks_for_heaps(const Call& call) {
  constexpr std::size_t kWorthAsking = std::size_t{8} << 10;
  if (call.size < 2 || call.bytes < kWorthAsking) return false;
  switch (call.kind) {
    case Kind::kBroadcast:
    case Kind::kAllReduce:
    case Kind::kReduce:
    case Kind::kAllGather:
    case Kind::kReduceScatter:
      return true;
    default:
      return false;
  }
}

std::string_view objection(const Row& row, const Call& call, const Preference& preference) {
  if (preference.fixed_order && !row.fixed_order) {
    return "adds in another order on every shard; fixed_order=False allows it";
  }
  if (is_in_heaps(row) && !row.suits(call)) return "not all ranks' tensors lie in heaps";
  if (!row.suits(call)) return "does not suit this size, world or operation";
  return "";
}

std::size_t pick(const Call& call, const Preference& preference) {
  std::size_t first = kTable.size();
  for (std::size_t i = 0; i < kTable.size(); ++i) {
    const Row& row = kTable[i];
    if (row.kind != call.kind || !objection(row, call, preference).empty()) continue;
    if (row.name == preference.algorithm) return i;
    if (first == kTable.size()) first = i;
  }
  return first;
}

}  // namespace dreamcomm
