// Pack and unpack on a GPU. Built with DREAMCOMM_BUILD_GPU_TESTS only, in place of
// gpu_bucket_on_host.cc.
#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/bucket_launch.h"
#include "gpu/bucket_plan.h"
#include "gpu/memory.h"
#include "gpu_bucket.h"

namespace dreamcomm::testing {
namespace {

/// Memory of the host, and its copy on the device, which is aligned as the original is.
class Copy {
 public:
  Copy(const gpu::OwnStream& stream, const void* host, std::size_t bytes)
      : stream_(stream),
        bytes_(bytes),
        skew_(reinterpret_cast<std::uintptr_t>(host) % 16),
        memory_(bytes + 16) {
    stream.copy(data(), host, bytes);
  }
  std::byte* data() const { return memory_.data() + skew_; }
  void bring(void* host) const { stream_.copy(host, data(), bytes_); }

 private:
  const gpu::OwnStream& stream_;
  std::size_t bytes_;
  std::size_t skew_;
  gpu::DeviceMemory memory_;
};

template <typename Tensor>
struct Copies {
  std::vector<std::unique_ptr<Copy>> all;
  std::vector<Tensor> tensors;

  Copies(const gpu::OwnStream& stream, std::span<const Tensor> hosts, std::size_t item) {
    for (const Tensor& host : hosts) {
      all.push_back(std::make_unique<Copy>(stream, host.data, host.count * item));
      tensors.push_back({all.back()->data(), host.count});
    }
  }
};

}  // namespace

Moved pack_on_gpu(const PackJob& job, const Grid&) {
  const gpu::OwnStream stream;
  const std::size_t count = gpu::count_of(job.tensors);
  const Copies<Source> sources(stream, job.tensors, item_size(job.from));
  const Copy out(stream, job.out, count * item_size(job.to));
  const Copy residual(stream, job.residual, job.residual == nullptr ? 0 : count * sizeof(float));
  PackJob there = job;
  there.tensors = sources.tensors;
  there.out = out.data();
  if (job.residual != nullptr) there.residual = reinterpret_cast<float*>(residual.data());
  const Moved moved = gpu::pack(there, stream.get());
  stream.wait();
  out.bring(job.out);
  if (job.residual != nullptr) residual.bring(job.residual);
  stream.wait();
  return moved;
}

Unpacked unpack_on_gpu(const UnpackJob& job, const Grid&) {
  const gpu::OwnStream stream;
  const std::size_t count = gpu::count_of(job.tensors);
  const Copy in(stream, job.in, count * item_size(job.from));
  const Copies<Target> targets(stream, job.tensors, item_size(job.to));
  const gpu::DeviceMemory partials((gpu::partials_of(count) + 1) * sizeof(double));
  const gpu::DeviceMemory results(2 * sizeof(double));
  UnpackJob there = job;
  there.in = in.data();
  there.tensors = targets.tensors;
  Unpacked result;
  result.moved = gpu::unpack(
      there,
      {reinterpret_cast<double*>(partials.data()), reinterpret_cast<double*>(results.data()),
       reinterpret_cast<bool*>(results.data() + sizeof(double))},
      stream.get());
  stream.wait();
  for (std::size_t i = 0; i < targets.all.size(); ++i) targets.all[i]->bring(job.tensors[i].data);
  if (job.inspect) {
    stream.copy(&result.squares, results.data(), sizeof(double));
    stream.copy(&result.finite, results.data() + sizeof(double), sizeof(bool));
  }
  stream.wait();
  return result;
}

}  // namespace dreamcomm::testing
