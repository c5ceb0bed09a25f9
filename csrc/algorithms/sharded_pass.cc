// The pass of a sharded optimizer, on gradients and parameters in the ranks' heaps.
//
//   1. Each rank writes where its gradients and parameters lie, and turns.
//   2. Each rank walks over its own elements of every parameter, a tile at a time: it reads the
//      tile of all ranks' gradients in rank order, has the optimizer change its own parameter, and
//      copies that into the peers'.
//   3. All ranks turn.
//
// INVARIANT: no element is read by one rank while another writes it. Proof. Only its owner reads
// or writes an element of any rank's parameter in step 2. No rank writes a gradient in step 2. A
// rank's earlier writes to its own tensors end before its turn of step 1. Its later ones begin
// after the turn of step 3, which follows all ranks' step 2.
//
// More parameters than a page has room for take a turn of step 1 for each page. Tiles of the first
// page are then walked before the second turn; the tables alternate between the two pages.
#include "core/sharded_pass.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "algorithms/algorithms.h"
#include "core/counts.h"
#include "kernels/bucket.h"
#include "kernels/reduce.h"
#include "kernels/transfer/stream.h"
#include "kernels/widen.h"

namespace dreamcomm::algorithms {
namespace {

/// Elements. Tiles of a step's streams lie in the L2 cache. Smaller ones cost more calls of torch's
/// square root.
constexpr std::size_t kTile = 16384;

/// Where a rank's tensors lie in its heap, from 1 on; 0: it has none. A gradient that is not read
/// only shows whether there is one.
struct Places {
  std::uint64_t gradient = 0;
  std::uint64_t parameter = 0;
};

alignas(64) constexpr std::array<std::byte, kTile * sizeof(double)> kZeros{};

class ShardedPassRun {
 public:
  ShardedPassRun(Primitives& prims, const Request& request)
      : prims_(prims),
        pass_(*request.pass),
        how_(request.reduction),
        sources_(static_cast<std::size_t>(prims.size())),
        operands_(sources_.size()),
        targets_(sources_.size()) {}

  void run() {
    const std::size_t at_once = prims_.room() / sizeof(Places);
    const std::size_t parts = pass_.parts().size();
    for (std::size_t first = 0; first == 0 || first < parts; first += at_once) {
      const std::size_t end = std::min(parts, first + at_once);
      publish(first, end);
      for (std::size_t part = first; part < end; ++part) walk(part, part - first);
    }
    prims_.exchange(Peers::all(), Peers::all());
  }

 private:
  void publish(std::size_t first, std::size_t end) {
    for (std::size_t i = first; i < end; ++i) {
      const ShardedPart& part = pass_.parts()[i];
      const std::uint64_t here = part.present ? 1 : 0;
      const Places mine{pass_.reads() ? prims_.place_of(part.gradient) : here,
                        prims_.place_of(part.parameter)};
      std::memcpy(prims_.page() + (i - first) * sizeof mine, &mine, sizeof mine);
    }
    prims_.exchange(Peers::all(), Peers::all());
  }

  /// Finds all ranks' tensors of the part. Returns whether any has a gradient.
  bool find(std::size_t row) {
    bool any = false;
    for (int rank = 0; rank < prims_.size(); ++rank) {
      Places places;
      std::memcpy(&places, prims_.from(rank) + row * sizeof places, sizeof places);
      const auto index = static_cast<std::size_t>(rank);
      if (pass_.reads()) sources_[index] = prims_.at_place(rank, places.gradient);
      targets_[index] = prims_.at_place(rank, places.parameter);
      any = any || places.gradient != 0;
    }
    return any;
  }

  void walk(std::size_t number, std::size_t row) {
    if (!find(row)) return;
    pass_.touch(number);
    const ShardedPart& part = pass_.parts()[number];
    for (std::size_t done = 0; done < part.count; done += kTile) {
      const std::size_t begin = part.begin + done;
      const std::size_t n = std::min(kTile, part.count - done);
      pass_.apply(number, begin, n, pass_.reads() ? average(part, begin, n) : nullptr);
      if (pass_.writes() && !part.replicated) write(part, begin, n);
    }
    count(part);
  }

  /// The average of all ranks' gradients, in rank order, in `sum_type`.
  const std::byte* average(const ShardedPart& part, std::size_t begin, std::size_t n) {
    const std::size_t item = item_size(part.gradient_type);
    for (std::size_t rank = 0; rank < sources_.size(); ++rank) {
      const std::byte* const source = sources_[rank];
      operands_[rank] = source == nullptr ? kZeros.data() : source + begin * item;
    }
    // Gradients of more bits than their sum are rounded once, at the end.
    const bool narrows = item_size(part.gradient_type) > item_size(part.sum_type);
    if (part.sum_type != part.gradient_type && !narrows) widen_all(part, n);
    const double factor = pass_.factor();
    Reduction how = how_;
    how.dtype = narrows ? part.gradient_type : part.sum_type;
    how.op = factor == 0 ? ReduceOp::kAvg : ReduceOp::kSum;
    if (how.counts != nullptr) how.divisor = how.counts->divisor();
    reduce(how, operands_, tile_.data(), n);
    const bool scales = factor != 0 && factor != 1;
    std::byte* const result = narrows ? narrow_.data() : tile_.data();
    if (scales || narrows) {
      const std::array target{Target{result, n}};
      unpack({.in = tile_.data(),
              .tensors = target,
              .from = how.dtype,
              .to = part.sum_type,
              .factor = scales ? factor : 1.0});
    }
    prims_.worked(Phase::kReduce);
    return result;
  }

  void widen_all(const ShardedPart& part, std::size_t n) {
    wide_.resize(operands_.size() * kTile * sizeof(double));
    for (std::size_t rank = 0; rank < operands_.size(); ++rank) {
      std::byte* const to = wide_.data() + rank * kTile * sizeof(double);
      if (part.sum_type == DType::kFloat64) {
        kernels::widen(part.gradient_type, operands_[rank], reinterpret_cast<double*>(to), n);
      } else {
        kernels::widen(part.gradient_type, operands_[rank], reinterpret_cast<float*>(to), n);
      }
      operands_[rank] = to;
    }
  }

  void write(const ShardedPart& part, std::size_t begin, std::size_t n) {
    const std::size_t item = item_size(part.parameter_type);
    for (int rank = 0; rank < prims_.size(); ++rank) {
      if (rank == prims_.rank()) continue;
      std::byte* const target = targets_[static_cast<std::size_t>(rank)];
      stream_copy(target + begin * item, part.parameter + begin * item, n * item);
    }
    prims_.worked(Phase::kCopyOut);
  }

  /// Counts what the ranks have read of each other's gradients, and written to each other.
  void count(const ShardedPart& part) {
    const auto own = static_cast<std::size_t>(prims_.rank());
    const std::size_t others = part.replicated ? part.numel : part.numel - part.count;
    if (pass_.reads()) {
      const std::size_t item = item_size(part.gradient_type);
      std::size_t read = 0;
      for (std::size_t rank = 0; rank < sources_.size(); ++rank) {
        if (rank != own && sources_[rank] != nullptr) read += part.count * item;
      }
      prims_.count_received(read);
      const std::size_t readers = part.replicated ? sources_.size() - 1 : 1;
      if (sources_[own] != nullptr) prims_.count_sent(others * item * readers);
    }
    if (pass_.writes() && !part.replicated) {
      const std::size_t item = item_size(part.parameter_type);
      prims_.count_sent(part.count * item * (sources_.size() - 1));
      prims_.count_received(others * item);
    }
  }

  Primitives& prims_;
  ShardedPass& pass_;
  const Reduction how_;                     // of averages
  std::vector<const std::byte*> sources_;   // of the part; null: that rank has no gradient
  std::vector<const std::byte*> operands_;  // of the tile
  std::vector<std::byte*> targets_;
  std::vector<std::byte> wide_;
  alignas(64) std::array<std::byte, kTile * sizeof(double)> tile_;
  alignas(64) std::array<std::byte, kTile * sizeof(float)> narrow_;
};

}  // namespace

void sharded_pass(Primitives& prims, const Request& request) {
  ShardedPassRun(prims, request).run();
}

}  // namespace dreamcomm::algorithms
