// Calls of every kind with known inputs, and their expected results.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace dreamcomm::testing {

using Bytes = std::vector<std::byte>;

/// `count` elements that depend on the rank, the block and a salt: small numbers,
/// so that integer products stay defined and float sums depend on their order.
Bytes make_block(DType dtype, std::size_t count, int rank, int block, int salt);

/// Where a case's tensors lie.
enum class Place {
  kPrivate,
  kHeap,  // in the rank's heap, its blocks one after the other
  kMixed  // some ranks' in the heap, some not
};

struct Case {
  Kind kind = Kind::kAllReduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kNone;
  std::size_t count = 0;  // elements of a block
  int root = 0;
  int salt = 0;
  bool in_place = false;  // all_reduce, reduce, broadcast
  Place place = Place::kPrivate;
  /// The ranks of each host, whose results are reduced in turn; null: one host.
  const std::vector<std::vector<int>>* hosts = nullptr;
};

/// Creates the tensors of the case, lets `run` execute the call, and throws unless the result has
/// the right bits.
void run_case_by(const Case& one, int rank, int size,
                 const std::function<void(const Request&)>& run);

/// Runs the case on this rank and throws unless the result has the right bits.
void run_case(Communicator& comm, const Case& one);

/// The same inside a submitted or ordered job.
void run_case_in_job(Communicator& comm, const Case& one);

std::string to_string(const Case& one);

}  // namespace dreamcomm::testing
