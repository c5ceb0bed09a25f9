// Ranks whose calls are carried out by the GPU's kernels: on the host target, or, in a
// build with DREAMCOMM_BUILD_GPU_TESTS, on a GPU that all ranks share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/communicator.h"
#include "gpu/collectives/dispatch.h"

namespace dreamcomm::testing {

/// How a call is to be carried out.
struct Way {
  gpu::AlgorithmId row = gpu::AlgorithmId::kStaged;
  int blocks = 1;
  int lanes = 1;
  int delays = 0;  // per mille of lanes that begin late, on the host target
  std::int64_t patience_ns = 60'000'000'000;
};

/// The result of a call.
struct Outcome {
  gpu::Report report{};   // reason kNone: it succeeded
  std::size_t moved = 0;  // bytes read and written, on the host target
};

/// The GPUs of a group of ranks; every rank calls it from its own thread.
class Gpus {
 public:
  virtual ~Gpus() = default;
  /// Carries the call out and waits for the kernel. Tensors in the ranks' heaps count as
  /// registered.
  virtual Outcome run(const Communicator& comm, const Request& request, const Way& way) = 0;
  /// Ends the running kernel of a rank.
  virtual void abort(int rank) = 0;
};

/// The rounds of all blocks begin after `start`.
std::unique_ptr<Gpus> make_gpus(int size, std::size_t page_bytes, std::uint32_t start);

/// The same. Throws if the kernel failed.
Outcome run_well(Gpus& gpus, const Communicator& comm, const Request& request, const Way& way);

/// The arguments that do not depend on where the memory is: all except in, out, heaps, windows,
/// rounds, control and report.
gpu::KernelArgs args_of(const Communicator& comm, const Request& request, const Way& way);

/// The blocks' offset in this rank's heap, plus 1; 0: they are not in it.
std::uint64_t place_in_heap(const Communicator& comm, std::span<const Block> blocks);

}  // namespace dreamcomm::testing
