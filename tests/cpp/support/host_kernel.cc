#include "cpp/support/host_kernel.h"

#include <memory>
#include <thread>
#include <vector>

#include "cpp/support/ranks.h"
#include "gpu/collectives/dispatch.h"
#include "gpu/collectives/host_target.h"

namespace dreamcomm::testing {
namespace {

void run_lane(const gpu::KernelArgs& args, const gpu::HostTarget& target, int delays) {
  pause(delays);
  gpu::Block<gpu::HostTarget> block(target, args);
  if (args.info.op == ReduceOp::kNone) return gpu::move_body(block);
  const bool known = gpu::with_format(
      args.info.dtype, [&]<typename F>(std::type_identity<F>) { gpu::reduce_body<F>(block); });
  require(known, "GPUs do not compute with this type");
}

}  // namespace

std::size_t run_kernel(const gpu::KernelArgs& args, int blocks, int lanes, int delays) {
  std::vector<std::unique_ptr<gpu::HostBlock>> shared;
  std::vector<std::thread> threads;
  for (int b = 0; b < blocks; ++b) {
    gpu::HostBlock& block = *shared.emplace_back(std::make_unique<gpu::HostBlock>(lanes));
    for (int lane = 0; lane < lanes; ++lane) {
      threads.emplace_back([&args, &block, blocks, delays, lane, b] {
        run_lane(args, gpu::HostTarget(block, lane, b, blocks), delays);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  std::size_t moved = 0;
  for (const auto& block : shared) moved += block->bytes_read() + block->bytes_written();
  return moved;
}

}  // namespace dreamcomm::testing
