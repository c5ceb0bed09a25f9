#include "algorithms/table.h"

#include <array>

#include "algorithms/algorithms.h"
#include "algorithms/cost/formulas.h"

namespace dreamcomm {
namespace {

bool always(const CallShape&) { return true; }

// The ring passes partial results on, so each rank must scale its own contribution exactly once.
// PREMUL_SUM scales where it adds. A tree's sums are no partial results of a ring.
bool ring_can(const CallShape& call) {
  return call.size > 1 && call.op != ReduceOp::kPremulSum && !call.along_tree;
}

bool is_in_heap(const CallShape& call) { return call.in_heap; }
bool is_all_in_heap(const CallShape& call) { return call.in_heap && call.out_heap; }

constexpr std::string_view kRing =
    "each rank talks to its two neighbours only: 2(N-1)/N x S, in 2(N-1) waits a chunk";

constexpr std::array<Row, 20> kTable{{
    {Kind::kBarrier, "direct", true, always, algorithms::barrier, formulas::one_turn,
     "one wait for all"},
    {Kind::kBroadcast, "heap", true, is_in_heap, algorithms::heap_broadcast,
     formulas::heap_broadcast, "the root's tensor, read in place"},
    {Kind::kBroadcast, "direct", true, always, algorithms::broadcast, formulas::broadcast,
     "the root's page, read by all"},
    {Kind::kAllReduce, "heap", true, is_all_in_heap, algorithms::heap_reduce, formulas::heap_reduce,
     "each rank reduces its shard of every tensor in place and writes it into all"},
    {Kind::kAllReduce, "one_shot", true, always, algorithms::one_shot, formulas::one_shot,
     "every rank reduces everything itself, one wait a chunk: N x S to read"},
    {Kind::kAllReduce, "direct", true, always, algorithms::direct_reduce, formulas::direct_reduce,
     "each rank reduces its shard of every peer's data in rank order: 2(N-1)/N x S"},
    {Kind::kAllReduce, "ring", false, ring_can, algorithms::ring_all_reduce,
     formulas::ring_all_reduce, kRing},
    {Kind::kAllReduce, "master", true, always, algorithms::master, formulas::master,
     "the textbook's master node: gather to rank 0, broadcast back, (N-1) x S each way"},
    {Kind::kReduce, "heap", true, is_all_in_heap, algorithms::heap_reduce, formulas::heap_reduce,
     "each rank reduces its shard of every tensor in place and writes it into the root's"},
    {Kind::kReduce, "direct", true, always, algorithms::direct_reduce, formulas::direct_reduce,
     "each rank reduces its shard in rank order, the root collects them"},
    {Kind::kAllGather, "heap", true, is_in_heap, algorithms::heap_all_gather,
     formulas::heap_all_gather, "each rank's tensor, read in place"},
    {Kind::kAllGather, "direct", true, always, algorithms::gather, formulas::all_gather,
     "each rank's page, read by all"},
    {Kind::kAllGather, "ring", true, ring_can, algorithms::ring_all_gather,
     formulas::ring_all_gather, "each rank passes on what its left neighbour has: (N-1)/N x S"},
    {Kind::kGather, "direct", true, always, algorithms::gather, formulas::gather,
     "each rank's page, read by the root"},
    {Kind::kScatter, "direct", true, always, algorithms::scatter, formulas::scatter,
     "the root's page, a piece for each"},
    {Kind::kReduceScatter, "heap", true, is_in_heap, algorithms::heap_reduce_scatter,
     formulas::heap_reduce_scatter, "each rank reduces its block of every tensor in place"},
    {Kind::kReduceScatter, "direct", true, always, algorithms::direct_reduce_scatter,
     formulas::direct_reduce_scatter,
     "each rank reduces its block of every peer's data in rank order: (N-1)/N x S"},
    {Kind::kReduceScatter, "ring", false, ring_can, algorithms::ring_reduce_scatter,
     formulas::ring_reduce_scatter, "partial sums travel along the ring: (N-1)/N x S"},
    {Kind::kAllToAll, "heap", true, is_in_heap, algorithms::all_to_all, formulas::heap_all_to_all,
     "each rank's blocks, read in place"},
    {Kind::kAllToAll, "direct", true, always, algorithms::all_to_all, formulas::all_to_all,
     "a piece of each page for each"},
}};

CallShape in_heaps(CallShape call) {
  call.in_heap = call.out_heap = true;
  return call;
}

}  // namespace

std::span<const Row> algorithm_table() { return kTable; }

bool is_in_heaps(const Row& row) { return row.name == "heap"; }

std::string_view objection(const Row& row, const CallShape& call, const Preference& preference) {
  if (preference.fixed_order && !row.fixed_order) {
    return "adds in another order on every shard; fixed_order=False allows it";
  }
  if (is_in_heaps(row) && !row.suits(call)) return "not all ranks' tensors lie in heaps";
  if (!row.suits(call)) return "does not suit this world or operation";
  return "";
}

double predict(const Row& row, const CallShape& call, const Costs& costs) {
  return costs.seconds(row.cost_terms(call), formulas::memory(call));
}

std::size_t pick(const CallShape& call, const Preference& preference) {
  std::size_t best = kTable.size();
  double least = 0;
  for (std::size_t i = 0; i < kTable.size(); ++i) {
    const Row& row = kTable[i];
    if (row.kind != call.kind || !objection(row, call, preference).empty()) continue;
    if (row.name == preference.algorithm) return i;
    const double seconds = predict(row, call, *preference.costs);
    if (best == kTable.size() || seconds < least) {
      best = i;
      least = seconds;
    }
  }
  return best;
}

bool asks_for_heaps(const CallShape& call, const Preference& preference) {
  if (call.size < 2 || call.bytes == 0) return false;
  const std::size_t picked = pick(in_heaps(call), preference);
  return picked < kTable.size() && is_in_heaps(kTable[picked]);
}

}  // namespace dreamcomm
