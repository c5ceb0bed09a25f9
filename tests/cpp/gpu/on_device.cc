// Kernels on a GPU: every rank has a stream, a window and registered memory of the one
// device. Built with DREAMCOMM_BUILD_GPU_TESTS only, in place of gpu_on_host.cc.
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "cpp/gpu/ranks.h"
#include "cpp/support/ranks.h"
#include "gpu/host/launch.h"
#include "gpu/host/memory.h"

namespace dreamcomm::testing {
namespace {

constexpr std::size_t kHeap = std::size_t{8} << 20;     // as large as the tests' heaps
constexpr std::size_t kScratch = std::size_t{4} << 20;  // for tensors that are not there

/// One rank's part of the device. Nothing is allocated while kernels run: that would wait
/// for them, and they may wait for the rank that allocates.
struct Part {
  Part(const gpu::Layout& layout, std::uint32_t start)
      : window(layout.bytes()),
        rounds(static_cast<std::size_t>(layout.blocks) * sizeof(std::uint64_t)),
        heap(kHeap),
        in(kScratch),
        out(kScratch),
        control(sizeof(gpu::Control)),
        report(sizeof(gpu::Report)) {
    std::vector<std::byte> image(layout.bytes());
    gpu::prepare_window(image.data(), layout, start);
    stream.copy(window.data(), image.data(), image.size());
    const std::vector<std::uint64_t> begin(static_cast<std::size_t>(layout.blocks), start);
    stream.copy(rounds.data(), begin.data(), begin.size() * sizeof(std::uint64_t));
  }

  gpu::DeviceMemory window;
  gpu::DeviceMemory rounds;
  gpu::DeviceMemory heap;
  gpu::DeviceMemory in;
  gpu::DeviceMemory out;
  gpu::MappedMemory control;
  gpu::MappedMemory report;
  gpu::OwnStream stream;
};

std::size_t bytes_of(std::span<const Block> blocks) {
  std::size_t sum = 0;
  for (const Block& block : blocks) sum += block.bytes;
  return sum;
}

class DeviceGpus final : public Gpus {
 public:
  DeviceGpus(int size, std::size_t page_bytes, std::uint32_t start) {
    gpu::load_kernels();
    layout_.page_bytes = page_bytes;
    layout_.blocks = 8;
    for (int rank = 0; rank < size; ++rank) {
      parts_.push_back(std::make_unique<Part>(layout_, start));
    }
  }

  Outcome run(const Communicator& comm, const Request& request, const Way& way) override {
    Part& part = *parts_[static_cast<std::size_t>(comm.rank())];
    gpu::KernelArgs args = args_of(comm, request, way);
    std::byte* in = args.in_place != 0 ? part.heap.data() + args.in_place - 1 : part.in.data();
    std::byte* out = args.out_place != 0 ? part.heap.data() + args.out_place - 1 : part.out.data();
    const bool over_itself =
        !request.in.empty() && !request.out.empty() && request.in[0].data == request.out[0].data;
    if (over_itself) out = in;
    require(bytes_of(request.in) <= kScratch && bytes_of(request.out) <= kScratch, "too large");
    for (std::byte* at = in; const Block& block : request.in) {
      part.stream.copy(at, block.data, block.bytes);
      at += block.bytes;
    }
    args.in = in;
    args.out = out;
    for (int r = 0; r < comm.size(); ++r) {
      args.heaps[r] = parts_[static_cast<std::size_t>(r)]->heap.data();
      args.windows[r] = parts_[static_cast<std::size_t>(r)]->window.data();
    }
    args.layout = layout_;
    args.info.page_bytes = static_cast<std::uint32_t>(layout_.page_bytes);
    args.rounds = reinterpret_cast<std::uint64_t*>(part.rounds.data());
    args.control = reinterpret_cast<gpu::Control*>(part.control.data());
    args.report = reinterpret_cast<gpu::Report*>(part.report.data());
    gpu::launch(args, {way.blocks, way.lanes}, part.stream.get());
    part.stream.wait();
    for (std::byte* at = out; const Block& block : request.out) {
      part.stream.copy(block.data, at, block.bytes);
      at += block.bytes;
    }
    Outcome outcome;
    std::memcpy(&outcome.report, part.report.data(), sizeof outcome.report);
    return outcome;
  }

  void abort(int rank) override {
    auto* control =
        reinterpret_cast<gpu::Control*>(parts_[static_cast<std::size_t>(rank)]->control.data());
    std::atomic_ref(control->abort).store(1);
  }

 private:
  gpu::Layout layout_;
  std::vector<std::unique_ptr<Part>> parts_;
};

}  // namespace

std::unique_ptr<Gpus> make_gpus(int size, std::size_t page_bytes, std::uint32_t start) {
  std::string why;
  if (gpu::device_count(why) == 0) throw std::runtime_error("these tests need a GPU: " + why);
  return std::make_unique<DeviceGpus>(size, page_bytes, start);
}

}  // namespace dreamcomm::testing
