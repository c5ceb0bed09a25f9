#include "gpu_ranks.h"

#include <string>

#include "algorithms/signature.h"
#include "ranks.h"

namespace dreamcomm::testing {

std::uint64_t place_in_heap(const Communicator& comm, std::span<const Block> blocks) {
  const std::span<std::byte> heap = comm.heap(comm.rank());
  if (blocks.empty() || heap.empty() || blocks[0].data < heap.data()) return 0;
  if (blocks[0].data >= heap.data() + heap.size()) return 0;
  return static_cast<std::uint64_t>(blocks[0].data - heap.data()) + 1;
}

gpu::Task task_of(const Communicator& comm, const Request& request, const Way& way) {
  gpu::Task task;
  const bool varies = request.kind == Kind::kAllToAll;
  task.bytes = varies || request.kind == Kind::kBarrier ? 0 : block_bytes(request);
  task.info = {.kind = request.kind,
               .op = request.reduction.op,
               .dtype = request.reduction.dtype,
               .row = static_cast<std::uint8_t>(way.row),
               .root = request.root,
               .blocks = static_cast<std::uint32_t>(way.blocks),
               .bytes = task.bytes};
  task.rank = comm.rank();
  task.size = comm.size();
  task.divisor = request.reduction.divisor;
  for (std::size_t r = 0; varies && r < request.in.size(); ++r) {
    task.in_bytes[r] = request.in[r].bytes;
    task.out_bytes[r] = request.out[r].bytes;
  }
  task.in_place = place_in_heap(comm, request.in);
  task.out_place = place_in_heap(comm, request.out);
  task.patience_ns = way.patience_ns;
  return task;
}

Outcome run_well(Gpus& gpus, const Communicator& comm, const Request& request, const Way& way) {
  const Outcome outcome = gpus.run(comm, request, way);
  require(outcome.report.claimed == 0,
          "the kernel gave up, reason " + std::to_string(outcome.report.reason));
  return outcome;
}

}  // namespace dreamcomm::testing
