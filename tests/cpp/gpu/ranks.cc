#include "cpp/gpu/ranks.h"

#include <string>

#include "algorithms/signature.h"
#include "cpp/support/ranks.h"

namespace dreamcomm::testing {

std::uint64_t place_in_heap(const Communicator& comm, std::span<const Block> blocks) {
  const std::span<std::byte> heap = comm.heap(comm.rank());
  if (blocks.empty() || heap.empty() || blocks[0].data < heap.data()) return 0;
  if (blocks[0].data >= heap.data() + heap.size()) return 0;
  return static_cast<std::uint64_t>(blocks[0].data - heap.data()) + 1;
}

gpu::KernelArgs args_of(const Communicator& comm, const Request& request, const Way& way) {
  gpu::KernelArgs args;
  const bool varies = request.kind == Kind::kAllToAll;
  args.bytes = varies || request.kind == Kind::kBarrier ? 0 : block_bytes(request);
  args.info = {.kind = request.kind,
               .op = request.reduction.op,
               .dtype = request.reduction.dtype,
               .row = static_cast<std::uint8_t>(way.row),
               .root = request.root,
               .blocks = static_cast<std::uint32_t>(way.blocks),
               .bytes = args.bytes};
  args.rank = comm.rank();
  args.size = comm.size();
  args.divisor = request.reduction.divisor;
  for (std::size_t r = 0; varies && r < request.in.size(); ++r) {
    args.in_bytes[r] = request.in[r].bytes;
    args.out_bytes[r] = request.out[r].bytes;
  }
  args.in_place = place_in_heap(comm, request.in);
  args.out_place = place_in_heap(comm, request.out);
  args.patience_ns = way.patience_ns;
  return args;
}

Outcome run_well(Gpus& gpus, const Communicator& comm, const Request& request, const Way& way) {
  const Outcome outcome = gpus.run(comm, request, way);
  require(outcome.report.claimed == 0,
          "the kernel failed, reason " + std::to_string(outcome.report.reason));
  return outcome;
}

}  // namespace dreamcomm::testing
