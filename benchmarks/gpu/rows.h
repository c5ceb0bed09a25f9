// The rows that are timed, and the bytes of memory that each moves on a device that holds all
// ranks: `n` ranks, `s` bytes of the largest tensor of each.
#pragma once

#include "core/types.h"
#include "gpu/collectives/algorithm_id.h"

namespace dreamcomm::benchmark {

struct Row {
  const char* call;
  const char* name;
  Kind kind;
  gpu::AlgorithmId row;
  bool registered;
  bool over_itself;
  double (*moved)(double n, double s);  // bytes of all ranks together
};

inline constexpr Row kRows[] = {
    {"all_reduce", "one_shot in place", Kind::kAllReduce, gpu::AlgorithmId::kOneShotInPlace, true,
     false, [](double n, double s) { return n * (n + 1) * s; }},
    {"all_reduce", "pull", Kind::kAllReduce, gpu::AlgorithmId::kPull, true, false,
     [](double n, double s) { return (3 * n + 1) * s; }},
    {"all_reduce", "push", Kind::kAllReduce, gpu::AlgorithmId::kPush, true, true,
     [](double n, double s) { return 2 * n * s; }},
    {"all_reduce", "one_shot staged", Kind::kAllReduce, gpu::AlgorithmId::kStaged, false, true,
     [](double n, double s) { return n * (n + 3) * s; }},
    {"all_reduce", "two_shot staged", Kind::kAllReduce, gpu::AlgorithmId::kTwoShot, false, true,
     [](double n, double s) { return (5 * n - 2) * s; }},
    {"all_reduce", "ring", Kind::kAllReduce, gpu::AlgorithmId::kRing, false, true,
     [](double n, double s) { return (6 * n - 4) * s; }},
    {"reduce_scatter", "in place", Kind::kReduceScatter, gpu::AlgorithmId::kInPlace, true, false,
     [](double n, double s) { return (n + 1) * s; }},
    {"reduce_scatter", "staged", Kind::kReduceScatter, gpu::AlgorithmId::kStaged, false, false,
     [](double n, double s) { return (3 * n - 1) * s; }},
    {"all_gather", "in place", Kind::kAllGather, gpu::AlgorithmId::kInPlace, true, false,
     [](double n, double s) { return 2 * n * s; }},
    {"all_gather", "staged", Kind::kAllGather, gpu::AlgorithmId::kStaged, false, false,
     [](double n, double s) { return (2 * n + 2) * s; }},
    {"broadcast", "in place", Kind::kBroadcast, gpu::AlgorithmId::kInPlace, true, false,
     [](double n, double s) { return 2 * n * s; }},
    {"broadcast", "staged", Kind::kBroadcast, gpu::AlgorithmId::kStaged, false, false,
     [](double n, double s) { return (2 * n + 2) * s; }},
};

}  // namespace dreamcomm::benchmark
