// Kernels on threads of the process.
#include <cstring>
#include <new>
#include <vector>

#include "cpp/gpu/ranks.h"
#include "cpp/support/host_kernel.h"
#include "cpp/support/ranks.h"
#include "gpu/collectives/host_target.h"

namespace dreamcomm::testing {
namespace {

struct Free {
  void operator()(std::byte* memory) const {
    ::operator delete(memory, std::align_val_t{gpu::kSector});
  }
};

class HostGpus final : public Gpus {
 public:
  HostGpus(int size, std::size_t page_bytes, std::uint32_t start)
      : controls_(static_cast<std::size_t>(size)), reports_(static_cast<std::size_t>(size)) {
    layout_.page_bytes = page_bytes;
    layout_.blocks = 8;
    for (int rank = 0; rank < size; ++rank) {
      windows_.emplace_back(
          static_cast<std::byte*>(::operator new(layout_.bytes(), std::align_val_t{gpu::kSector})));
      gpu::prepare_window(windows_.back().get(), layout_, start);
      rounds_.emplace_back(static_cast<std::size_t>(layout_.blocks), std::uint64_t{start});
    }
  }

  Outcome run(const Communicator& comm, const Request& request, const Way& way) override {
    const auto self = static_cast<std::size_t>(comm.rank());
    gpu::KernelArgs args = args_of(comm, request, way);
    if (!request.in.empty()) args.in = request.in[0].data;
    if (!request.out.empty()) args.out = request.out[0].data;
    for (int r = 0; r < comm.size(); ++r) {
      args.heaps[r] = comm.heap(r).data();
      args.windows[r] = windows_[static_cast<std::size_t>(r)].get();
    }
    args.layout = layout_;
    args.info.page_bytes = static_cast<std::uint32_t>(layout_.page_bytes);
    args.rounds = rounds_[self].data();
    args.control = &controls_[self];
    args.report = &reports_[self];
    const std::size_t moved = run_kernel(args, way.blocks, way.lanes, way.delays);
    return {reports_[self], moved};
  }

  void abort(int rank) override {
    gpu::HostBlock alone(1);
    gpu::HostTarget(alone, 0, 0, 1).publish(&controls_[static_cast<std::size_t>(rank)].abort, 1);
  }

 private:
  gpu::Layout layout_;
  std::vector<std::unique_ptr<std::byte, Free>> windows_;
  std::vector<std::vector<std::uint64_t>> rounds_;
  std::vector<gpu::Control> controls_;
  std::vector<gpu::Report> reports_;
};

}  // namespace

std::unique_ptr<Gpus> make_gpus(int size, std::size_t page_bytes, std::uint32_t start) {
  return std::make_unique<HostGpus>(size, page_bytes, start);
}

}  // namespace dreamcomm::testing
