// Times the rows of all_reduce on one GPU that holds all ranks.
//
//   dreamcomm_gpu_rows [MIB_PER_RANK]
//
// One cooperative kernel carries out the calls of N ranks, whose tensors are all in the
// memory of the one device: so what is timed is how near a row comes to that memory's
// speed, and nothing about links between GPUs. Rate: the bytes of the row's formula over
// the time, beside the rate of a device-to-device copy in the same run (read and write
// counted). Results are verified first. Prints a line of JSON for each row. Where several
// ranks read the same bytes at about the same time, the device's L2 cache serves some of
// them: the share of one_shot may exceed 1.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "gpu/check.cuh"
#include "gpu/kernel.h"
#include "gpu/launch.h"
#include "gpu/memory.h"

namespace {

using namespace dreamcomm;
using gpu::check_cuda;
using gpu::RowId;

constexpr int kRepeats = 20;

struct Event {
  Event() { check_cuda(cudaEventCreate(&event), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t event = nullptr;
};

/// The median of the times of `call`, in seconds.
template <typename Call>
double median_seconds(cudaStream_t stream, const Call& call) {
  const Event begin;
  const Event end;
  std::vector<double> times;
  for (int i = 0; i < kRepeats + 3; ++i) {
    check_cuda(cudaEventRecord(begin.event, stream), "cudaEventRecord");
    call();
    check_cuda(cudaEventRecord(end.event, stream), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end.event), "cudaEventSynchronize");
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin.event, end.event), "cudaEventElapsedTime");
    if (i >= 3) times.push_back(1e-3 * milliseconds);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// All ranks' memory on the device.
class Ranks {
 public:
  Ranks(int size, std::size_t bytes) : size_(size), bytes_(bytes), tasks_(sizeof(gpu::Task) * 16) {
    std::vector<std::byte> image(layout_.bytes());
    gpu::prepare_window(image.data(), layout_, 0);
    for (int r = 0; r < size; ++r) {
      windows_.push_back(std::make_unique<gpu::DeviceMemory>(layout_.bytes()));
      rounds_.push_back(std::make_unique<gpu::DeviceMemory>(gpu::kMaxBlocks * 8));
      heaps_.push_back(std::make_unique<gpu::DeviceMemory>(2 * bytes));
      told_.push_back(std::make_unique<gpu::MappedMemory>(sizeof(gpu::Control)));
      reports_.push_back(std::make_unique<gpu::MappedMemory>(sizeof(gpu::Report)));
      stream_.copy(windows_.back()->data(), image.data(), image.size());
    }
  }

  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_.get()); }

  /// Prepares calls of a row; `over_itself`: the output is the input.
  void prepare(RowId row, bool registered, bool over_itself, int blocks) {
    calls_.assign(static_cast<std::size_t>(size_), {});
    blocks_ = blocks;
    for (int r = 0; r < size_; ++r) {
      gpu::Task& task = calls_[static_cast<std::size_t>(r)];
      task.card = {.kind = Kind::kAllReduce,
                   .op = ReduceOp::kSum,
                   .dtype = DType::kFloat32,
                   .row = static_cast<std::uint8_t>(row),
                   .blocks = static_cast<std::uint32_t>(blocks),
                   .page_bytes = static_cast<std::uint32_t>(layout_.page_bytes),
                   .bytes = bytes_};
      task.rank = r;
      task.size = size_;
      task.bytes = bytes_;
      task.in = heaps_[static_cast<std::size_t>(r)]->data();
      task.out = heaps_[static_cast<std::size_t>(r)]->data() + (over_itself ? 0 : bytes_);
      task.in_place = registered ? 1 : 0;
      task.out_place = registered ? 1 + (over_itself ? 0 : bytes_) : 0;
      for (int peer = 0; peer < size_; ++peer) {
        task.heaps[peer] = heaps_[static_cast<std::size_t>(peer)]->data();
        task.windows[peer] = windows_[static_cast<std::size_t>(peer)]->data();
      }
      task.layout = layout_;
      task.rounds = reinterpret_cast<std::uint64_t*>(rounds_[static_cast<std::size_t>(r)]->data());
      task.control = reinterpret_cast<gpu::Control*>(told_[static_cast<std::size_t>(r)]->data());
      task.report = reinterpret_cast<gpu::Report*>(reports_[static_cast<std::size_t>(r)]->data());
      task.patience_ns = 5'000'000'000;
    }
    stream_.copy(tasks_.data(), calls_.data(), calls_.size() * sizeof(gpu::Task));
  }

  void launch() {
    gpu::launch_ranks(calls_, reinterpret_cast<const gpu::Task*>(tasks_.data()),
                      {blocks_, gpu::most_lanes()}, stream_.get());
  }

  /// Fills the inputs with rank + 1, runs once, and looks at every element.
  bool verify() {
    std::vector<float> data(bytes_ / sizeof(float));
    for (int r = 0; r < size_; ++r) {
      std::fill(data.begin(), data.end(), static_cast<float>(r + 1));
      const gpu::Task& task = calls_[static_cast<std::size_t>(r)];
      stream_.copy(const_cast<std::byte*>(task.in), data.data(), bytes_);
    }
    launch();
    stream_.wait();
    const auto sum = static_cast<float>(size_ * (size_ + 1) / 2);
    for (const gpu::Task& task : calls_) {
      if (task.report->claimed != 0) return false;
      stream_.copy(data.data(), task.out, bytes_);
      if (!std::all_of(data.begin(), data.end(), [&](float x) { return x == sum; })) return false;
    }
    return true;
  }

 private:
  const int size_;
  const std::size_t bytes_;
  const gpu::Layout layout_{};
  gpu::OwnStream stream_;
  gpu::DeviceMemory tasks_;
  std::vector<std::unique_ptr<gpu::DeviceMemory>> windows_;
  std::vector<std::unique_ptr<gpu::DeviceMemory>> rounds_;
  std::vector<std::unique_ptr<gpu::DeviceMemory>> heaps_;
  std::vector<std::unique_ptr<gpu::MappedMemory>> told_;
  std::vector<std::unique_ptr<gpu::MappedMemory>> reports_;
  std::vector<gpu::Task> calls_;
  int blocks_ = 1;
};

struct Timed {
  const char* name;
  RowId row;
  bool registered;
  bool over_itself;
  double (*bytes)(double n, double s);  // of memory, all ranks together
};

constexpr Timed kRows[] = {
    {"one_shot in place", RowId::kOneShotInPlace, true, false,
     [](double n, double s) { return n * (n + 1) * s; }},
    {"pull", RowId::kPull, true, false, [](double n, double s) { return (3 * n + 1) * s; }},
    {"push", RowId::kPush, true, true, [](double n, double s) { return 2 * n * s; }},
    {"one_shot staged", RowId::kStaged, false, true,
     [](double n, double s) { return n * (n + 3) * s; }},
    {"two_shot staged", RowId::kTwoShot, false, true,
     [](double n, double s) { return (5 * n - 2) * s; }},
    {"ring", RowId::kRing, false, true, [](double n, double s) { return (6 * n - 4) * s; }},
};

/// Bytes read and written each second by a copy within the device.
double copy_rate(std::size_t bytes) {
  const gpu::OwnStream stream;
  const gpu::DeviceMemory from(bytes);
  const gpu::DeviceMemory to(bytes);
  auto* handle = static_cast<cudaStream_t>(stream.get());
  const double seconds = median_seconds(handle, [&] {
    check_cuda(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, handle),
               "cudaMemcpyAsync");
  });
  return 2.0 * static_cast<double>(bytes) / seconds;
}

int run(std::size_t bytes) {
  int processors = 0;
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0),
             "cudaDeviceGetAttribute");
  gpu::load_kernels();
  const double ceiling = copy_rate(std::size_t{1} << 30);
  bool all_right = true;
  for (const int size : {2, 4, 8}) {
    Ranks ranks(size, bytes);
    for (const Timed& timed : kRows) {
      ranks.prepare(timed.row, timed.registered, timed.over_itself,
                    std::min(gpu::kMaxBlocks, processors / size));
      const bool right = ranks.verify();
      all_right = all_right && right;
      const double seconds = median_seconds(ranks.stream(), [&] { ranks.launch(); });
      const double rate = timed.bytes(size, static_cast<double>(bytes)) / seconds;
      std::printf(
          "{\"row\": \"%s\", \"ranks\": %d, \"bytes\": %zu, \"verified\": %s, "
          "\"us\": %.2f, \"gb_per_s\": %.1f, \"copy_gb_per_s\": %.1f, \"share\": %.3f}\n",
          timed.name, size, bytes, right ? "true" : "false", 1e6 * seconds, 1e-9 * rate,
          1e-9 * ceiling, rate / ceiling);
      std::fflush(stdout);
    }
  }
  return all_right ? 0 : 1;
}

}  // namespace

int main(int count, char** words) {
  const long mib = count > 1 ? std::atol(words[1]) : 256;
  if (mib < 1 || mib > 4096) {
    std::fprintf(stderr, "usage: %s [MIB_PER_RANK, 1 to 4096]\n", words[0]);
    return 2;
  }
  try {
    return run(static_cast<std::size_t>(mib) << 20U);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dreamcomm_gpu_rows: %s\n", error.what());
    return 1;
  }
}
