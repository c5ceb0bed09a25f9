// N ranks whose tensors and windows are all in the memory of one device, and whose calls one
// cooperative kernel carries out. Calls are verified on the device itself.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "device.cuh"
#include "gpu/collectives/dispatch.h"
#include "gpu/host/launch.h"

namespace dreamcomm::benchmark {

/// A call of one row. `bytes` of the largest tensor of a rank, as nccl-tests counts.
struct Call {
  Kind kind = Kind::kAllReduce;
  gpu::AlgorithmId row = gpu::AlgorithmId::kStaged;
  std::size_t bytes = 0;
  bool registered = false;
  bool over_itself = false;  // the output is the input
  int blocks = 1;
  int lanes = 512;

  bool sums() const { return kind == Kind::kAllReduce || kind == Kind::kReduceScatter; }
  bool has_blocks() const { return kind == Kind::kReduceScatter || kind == Kind::kAllGather; }
  std::size_t block_bytes(int size) const {
    return has_blocks() ? bytes / static_cast<std::size_t>(size) : bytes;
  }
};

class VirtualRanks {
 public:
  /// Room for calls of up to `bytes` by kernels of up to `blocks` for each rank.
  VirtualRanks(int size, std::size_t bytes, int blocks)
      : size_(size),
        bytes_(bytes),
        layout_{.blocks = blocks},
        tasks_(sizeof(gpu::KernelArgs) * gpu::kMaxRanks),
        wrong_(sizeof(unsigned long long)) {
    std::vector<std::byte> image(layout_.bytes());
    gpu::prepare_window(image.data(), layout_, 0);
    for (int r = 0; r < size; ++r) {
      windows_.push_back(std::make_unique<gpu::DeviceMemory>(layout_.bytes()));
      rounds_.push_back(
          std::make_unique<gpu::DeviceMemory>(gpu::kMaxBlocks * sizeof(std::uint64_t)));
      heaps_.push_back(std::make_unique<gpu::DeviceMemory>(2 * bytes));
      told_.push_back(std::make_unique<gpu::MappedMemory>(sizeof(gpu::Control)));
      reports_.push_back(std::make_unique<gpu::MappedMemory>(sizeof(gpu::Report)));
      stream_.copy(windows_.back()->data(), image.data(), image.size());
    }
  }

  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_.get()); }

  void prepare(const Call& call) {
    call_ = call;
    calls_.clear();
    for (int r = 0; r < size_; ++r) calls_.push_back(args_of(r));
    stream_.copy(tasks_.data(), calls_.data(), calls_.size() * sizeof(gpu::KernelArgs));
  }

  /// Starts the call in the order of the stream, which a graph may capture.
  void launch() {
    gpu::launch_ranks(calls_, reinterpret_cast<const gpu::KernelArgs*>(tasks_.data()),
                      {call_.blocks, call_.lanes}, stream_.get());
  }

  /// Runs the call once on known inputs, and checks every element of every output.
  bool verify() {
    if (call_.kind == Kind::kBarrier) return run_and_count([](int) {}) == 0;
    for (int r = 0; r < size_; ++r) {
      // The output of an earlier call could be right.
      check_cuda(cudaMemsetAsync(output(r), 0xff, bytes_, stream()), "cudaMemsetAsync");
      const std::size_t given =
          call_.kind == Kind::kAllGather ? call_.block_bytes(size_) : call_.bytes;
      fill_kernel<<<kFillBlocks, kFillLanes, 0, stream()>>>(reinterpret_cast<float*>(input(r)),
                                                            given / sizeof(float), factor(r));
    }
    return run_and_count([&](int rank) { compare(rank); }) == 0;
  }

  const char* failure() const {
    for (const gpu::KernelArgs& args : calls_) {
      if (args.report->claimed != 0) return "the kernel failed";
    }
    return nullptr;
  }

 private:
  static constexpr int kFillBlocks = 256;
  static constexpr int kFillLanes = 256;
  static float factor(int rank) { return static_cast<float>(rank + 1); }

  std::byte* input(int rank) const { return heaps_[static_cast<std::size_t>(rank)]->data(); }
  std::byte* output(int rank) const { return input(rank) + (call_.over_itself ? 0 : bytes_); }

  gpu::KernelArgs args_of(int rank) const {
    const auto r = static_cast<std::size_t>(rank);
    gpu::KernelArgs args;
    args.bytes = call_.block_bytes(size_);
    args.info = {.kind = call_.kind,
                 .op = call_.sums() ? ReduceOp::kSum : ReduceOp::kNone,
                 .dtype = call_.sums() ? DType::kFloat32 : DType::kOpaque,
                 .row = static_cast<std::uint8_t>(call_.row),
                 .blocks = static_cast<std::uint32_t>(call_.blocks),
                 .page_bytes = static_cast<std::uint32_t>(layout_.page_bytes),
                 .bytes = args.bytes};
    args.rank = rank;
    args.size = size_;
    args.in = input(rank);
    args.out = output(rank);
    args.in_place = call_.registered ? 1 : 0;
    args.out_place = call_.registered ? 1 + (call_.over_itself ? 0 : bytes_) : 0;
    for (int peer = 0; peer < size_; ++peer) {
      args.heaps[peer] = heaps_[static_cast<std::size_t>(peer)]->data();
      args.windows[peer] = windows_[static_cast<std::size_t>(peer)]->data();
    }
    args.layout = layout_;
    args.rounds = reinterpret_cast<std::uint64_t*>(rounds_[r]->data());
    args.control = reinterpret_cast<gpu::Control*>(told_[r]->data());
    args.report = reinterpret_cast<gpu::Report*>(reports_[r]->data());
    args.patience_ns = 20'000'000'000;
    return args;
  }

  /// Launches, lets `look` count wrong elements, and adds the number of failed kernels.
  template <typename Look>
  unsigned long long run_and_count(const Look& look) {
    check_cuda(cudaMemsetAsync(wrong_.data(), 0, sizeof(unsigned long long), stream()),
               "cudaMemsetAsync");
    launch();
    for (int r = 0; r < size_; ++r) look(r);
    check_cuda(cudaGetLastError(), "a kernel that compares");
    unsigned long long wrong = 0;
    stream_.copy(&wrong, wrong_.data(), sizeof wrong);
    return wrong + (failure() == nullptr ? 0 : 1);
  }

  void compare(int rank) const {
    const auto* found = reinterpret_cast<const float*>(output(rank));
    const std::size_t block = call_.block_bytes(size_) / sizeof(float);
    const auto sum = static_cast<float>(size_ * (size_ + 1) / 2);
    switch (call_.kind) {
      case Kind::kReduceScatter:
        return compare(found, block, static_cast<std::size_t>(rank) * block, sum);
      case Kind::kAllGather:
        for (int r = 0; r < size_; ++r) {
          compare(found + static_cast<std::size_t>(r) * block, block, 0, factor(r));
        }
        return;
      case Kind::kBroadcast:
        return compare(found, block, 0, factor(0));
      default:
        return compare(found, block, 0, sum);
    }
  }

  void compare(const float* found, std::size_t count, std::size_t first, float factor) const {
    compare_kernel<<<kFillBlocks, kFillLanes, 0, stream()>>>(
        found, count, first, factor, reinterpret_cast<unsigned long long*>(wrong_.data()));
  }

  const int size_;
  const std::size_t bytes_;
  const gpu::Layout layout_;
  gpu::OwnStream stream_;
  gpu::DeviceMemory tasks_;
  gpu::DeviceMemory wrong_;
  std::vector<std::unique_ptr<gpu::DeviceMemory>> windows_;
  std::vector<std::unique_ptr<gpu::DeviceMemory>> rounds_;
  std::vector<std::unique_ptr<gpu::DeviceMemory>> heaps_;
  std::vector<std::unique_ptr<gpu::MappedMemory>> told_;
  std::vector<std::unique_ptr<gpu::MappedMemory>> reports_;
  Call call_;
  std::vector<gpu::KernelArgs> calls_;
};

}  // namespace dreamcomm::benchmark
