// Pack and unpack on a GPU. Built with DREAMCOMM_BUILD_GPU_TESTS only, in place of
// gpu_bucket_on_host.cc.
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "core/request.h"
#include "cpp/gpu/bucket.h"
#include "gpu/bucket/launch.h"
#include "gpu/bucket/plan.h"
#include "gpu/host/memory.h"

namespace dreamcomm::testing {
namespace {

/// Memory of the host and its copies on the device, in one allocation: each of its own would
/// take 2 MiB. A copy is aligned as the original is.
class Copies {
 public:
  Copies(const gpu::OwnStream& stream, std::vector<Block> hosts)
      : stream_(stream), hosts_(std::move(hosts)) {
    std::size_t end = 0;
    for (const Block& host : hosts_) {
      const std::size_t skew = reinterpret_cast<std::uintptr_t>(host.data) % kAlign;
      offsets_.push_back(chunks(end, kAlign) * kAlign + skew);
      end = offsets_.back() + host.bytes;
    }
    memory_ = std::make_unique<gpu::DeviceMemory>(end + 1);
    for (std::size_t i = 0; i < hosts_.size(); ++i) {
      if (hosts_[i].bytes > 0) stream_.copy(at(i), hosts_[i].data, hosts_[i].bytes);
    }
  }
  std::byte* at(std::size_t index) const { return memory_->data() + offsets_[index]; }
  void bring(std::size_t index) const {
    const Block& host = hosts_[index];
    if (host.bytes > 0) stream_.copy(host.data, at(index), host.bytes);
  }

 private:
  static constexpr std::size_t kAlign = 16;
  const gpu::OwnStream& stream_;
  std::vector<Block> hosts_;
  std::vector<std::size_t> offsets_;
  std::unique_ptr<gpu::DeviceMemory> memory_;
};

Block block_of(const void* data, std::size_t bytes) {
  return {static_cast<std::byte*>(const_cast<void*>(data)), bytes};
}

/// The tensors of a job, one by one, and what comes after them.
template <typename Tensor>
std::vector<Block> blocks_of(std::span<const Tensor> tensors, std::size_t item,
                             std::initializer_list<Block> more) {
  std::vector<Block> blocks;
  for (const Tensor& tensor : tensors) blocks.push_back(block_of(tensor.data, tensor.count * item));
  blocks.insert(blocks.end(), more);
  return blocks;
}

template <typename Tensor>
std::vector<Tensor> tensors_at(const Copies& copies, std::span<const Tensor> hosts) {
  std::vector<Tensor> tensors;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    tensors.push_back({copies.at(i), hosts[i].count});
  }
  return tensors;
}

/// Where a kernel's table of tensors is put, if the grid asks for that.
class Table {
 public:
  Table(const gpu::OwnStream& stream, const Grid& grid) : stream_(stream), grid_(grid) {}
  gpu::Stage stage() {
    if (!grid_.listed) return {};
    return [this](std::span<const std::byte> bytes) -> const void* {
      memory_ = std::make_unique<gpu::DeviceMemory>(bytes.size());
      stream_.copy(memory_->data(), bytes.data(), bytes.size());
      return memory_->data();
    };
  }

 private:
  const gpu::OwnStream& stream_;
  const Grid grid_;
  std::unique_ptr<gpu::DeviceMemory> memory_;
};

}  // namespace

Moved pack_on_gpu(const PackJob& job, const Grid& grid) {
  const gpu::OwnStream stream;
  Table table(stream, grid);
  const std::size_t count = gpu::count_of(job.tensors);
  const std::size_t out = job.tensors.size();
  const std::size_t residual = out + 1;
  const bool feeds_back = job.residual != nullptr;
  const Copies copies(stream,
                      blocks_of(job.tensors, item_size(job.from),
                                {block_of(job.out, count * item_size(job.to)),
                                 block_of(job.residual, feeds_back ? count * sizeof(float) : 0)}));
  const std::vector<Source> sources = tensors_at(copies, job.tensors);
  PackJob there = job;
  there.tensors = sources;
  there.out = copies.at(out);
  if (feeds_back) there.residual = reinterpret_cast<float*>(copies.at(residual));
  const Moved moved = gpu::pack(there, stream.get(), table.stage());
  stream.wait();
  copies.bring(out);
  copies.bring(residual);
  return moved;
}

Unpacked unpack_on_gpu(const UnpackJob& job, const Grid& grid) {
  const gpu::OwnStream stream;
  Table table(stream, grid);
  const std::size_t count = gpu::count_of(job.tensors);
  const Copies copies(stream, blocks_of(job.tensors, item_size(job.to),
                                        {block_of(job.in, count * item_size(job.from))}));
  const gpu::DeviceMemory partials((gpu::partials_of(count) + 1) * sizeof(double));
  const gpu::DeviceMemory results(2 * sizeof(double));
  const std::vector<Target> targets = tensors_at(copies, job.tensors);
  UnpackJob there = job;
  there.in = copies.at(targets.size());
  there.tensors = targets;
  Unpacked result;
  result.moved = gpu::unpack(
      there,
      {reinterpret_cast<double*>(partials.data()), reinterpret_cast<double*>(results.data()),
       reinterpret_cast<bool*>(results.data() + sizeof(double))},
      stream.get(), table.stage());
  stream.wait();
  for (std::size_t i = 0; i < targets.size(); ++i) copies.bring(i);
  if (job.inspect) {
    stream.copy(&result.squares, results.data(), sizeof(double));
    stream.copy(&result.finite, results.data() + sizeof(double), sizeof(bool));
  }
  stream.wait();
  return result;
}

}  // namespace dreamcomm::testing
