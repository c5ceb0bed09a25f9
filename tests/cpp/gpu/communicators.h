// Helpers for tests of groups for tensors on GPUs.
#pragma once

#include <chrono>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "cpp/support/calls.h"
#include "gpu/host/communicator.h"

namespace dreamcomm::testing {

/// An exchange by the CPU's group, as in the backend.
inline gpu::Exchange exchange_over(Communicator& comm) {
  return [&comm](std::span<const std::byte> mine, std::span<std::byte> all) {
    const Block in{const_cast<std::byte*>(mine.data()), mine.size()};
    std::vector<Block> out;
    for (int r = 0; r < comm.size(); ++r) {
      out.push_back({all.data() + static_cast<std::size_t>(r) * mine.size(), mine.size()});
    }
    Request request;
    request.kind = Kind::kAllGather;
    request.in = std::span(&in, 1);
    request.out = out;
    comm.run(request);
  };
}

inline Request sum_of(const Block& data,
                      std::chrono::milliseconds time = std::chrono::seconds(60)) {
  Request request;
  request.kind = Kind::kAllReduce;
  request.reduction = {.dtype = DType::kFloat32, .op = ReduceOp::kSum};
  request.in = request.out = std::span(&data, 1);
  request.deadline = Clock::now() + time;
  return request;
}

/// Calls of all kinds, empty to many pages long.
inline std::vector<Case> cases_of_all_kinds(int size) {
  std::vector<Case> cases;
  int salt = 0;
  for (const std::size_t count : {0, 1, 255, 20'000}) {
    for (const Kind kind :
         {Kind::kBarrier, Kind::kBroadcast, Kind::kAllGather, Kind::kGather, Kind::kScatter,
          Kind::kAllToAll, Kind::kAllReduce, Kind::kReduce, Kind::kReduceScatter}) {
      const bool sums =
          kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
      cases.push_back({.kind = kind,
                       .dtype = DType::kFloat32,
                       .op = sums ? ReduceOp::kSum : ReduceOp::kNone,
                       .count = count,
                       .root = salt % size,
                       .salt = salt,
                       .in_place = salt % 2 == 1});
      ++salt;
    }
  }
  return cases;
}

}  // namespace dreamcomm::testing
