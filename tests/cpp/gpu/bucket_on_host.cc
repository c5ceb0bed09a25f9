// The kernels of pack and unpack on threads of the process.
#include <memory>
#include <thread>
#include <vector>

#include "cpp/gpu/bucket.h"
#include "cpp/support/ranks.h"
#include "gpu/bucket/launch.h"
#include "gpu/bucket/plan.h"
#include "gpu/collectives/host_target.h"

namespace dreamcomm::testing {
namespace {

using gpu::HostTarget;
using kernels::Inspector;

struct alignas(16) Scratch {
  std::byte bytes[std::size_t{48} << 10];  // as a GPU's blocks have them unasked
};

/// Each lane a thread; the bytes moved.
template <typename Body>
Moved run_kernel(const Grid& grid, const Body& body) {
  std::vector<std::unique_ptr<gpu::HostBlock>> blocks;
  std::vector<std::unique_ptr<Scratch>> scratch;
  std::vector<std::thread> threads;
  for (int b = 0; b < grid.blocks; ++b) {
    gpu::HostBlock& shared = *blocks.emplace_back(std::make_unique<gpu::HostBlock>(grid.lanes));
    std::byte* memory = scratch.emplace_back(std::make_unique<Scratch>())->bytes;
    for (int lane = 0; lane < grid.lanes; ++lane) {
      threads.emplace_back([&body, &shared, &grid, memory, lane, b] {
        body(HostTarget(shared, lane, b, grid.blocks), memory);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  Moved moved;
  for (const auto& block : blocks) {
    moved.read += block->bytes_read();
    moved.written += block->bytes_written();
  }
  return moved;
}

std::vector<gpu::BucketRow> rows_of(const gpu::Bucket& bucket, bool listed) {
  if (!listed || bucket.parts.empty()) return gpu::rows_of(bucket);
  gpu::BucketRow whole{bucket.task, bucket.parts};
  whole.task.parts = static_cast<int>(bucket.parts.size());
  return {whole};
}

template <bool kPacks>
Moved run_rows(const gpu::Bucket& bucket, DType from, DType to, const Grid& grid) {
  Moved all;
  for (const gpu::BucketRow& row : rows_of(bucket, grid.listed)) {
    require(grid.listed || row.parts.size() <= std::size_t{gpu::kManyParts},
            "more than a kernel has room for");
    const bool known = gpu::with_format(from, [&]<typename From>(std::type_identity<From>) {
      gpu::with_format(to, [&]<typename To>(std::type_identity<To>) {
        if constexpr (std::is_floating_point_v<typename From::Accumulator> &&
                      std::is_floating_point_v<typename To::Accumulator>) {
          static_assert(gpu::bucket_scratch<To>() <= sizeof(Scratch));
          const Moved moved = run_kernel(grid, [&](const HostTarget& target, std::byte* memory) {
            gpu::bucket_body<kPacks, From, To>(target, row.task, row.parts.data(), memory);
          });
          all.read += moved.read;
          all.written += moved.written;
        }
      });
    });
    require(known, "GPUs do not compute with this type");
  }
  return all;
}

}  // namespace

Moved pack_on_gpu(const PackJob& job, const Grid& grid) {
  return run_rows<true>(gpu::bucket_of(job), job.from, job.to, grid);
}

Unpacked unpack_on_gpu(const UnpackJob& job, const Grid& grid) {
  const std::size_t count = gpu::partials_of(gpu::count_of(job.tensors));
  std::vector<double> partials(count);
  const gpu::Bucket bucket = gpu::bucket_of(job, job.inspect ? partials.data() : nullptr);
  Unpacked result;
  result.moved = run_rows<false>(bucket, job.from, job.to, grid);
  if (job.inspect) {
    run_kernel({1, grid.lanes}, [&](const HostTarget& target, std::byte* memory) {
      gpu::finish_body(target, partials.data(), count, &result.squares, &result.finite, memory);
    });
  }
  return result;
}

}  // namespace dreamcomm::testing
