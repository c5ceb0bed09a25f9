// Calls whose tensors lie on a device, and are checked on the host.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "gpu/group.h"
#include "gpu/memory.h"

namespace dreamcomm::testing {

inline constexpr std::size_t kTensorBytes = std::size_t{8} << 20;  // of all tensors of a call

/// A call's tensors in memory of the device that is given, block after block. Nothing is
/// allocated for a call: that may wait for the kernels that run, and they for this rank.
class OnDevice {
 public:
  OnDevice(const gpu::OwnStream& stream, const Request& request, std::byte* memory)
      : stream_(stream), mine_(request) {
    const bool same =
        !request.in.empty() && !request.out.empty() && request.in[0].data == request.out[0].data;
    std::byte* const after = place(request.in, in_, memory);
    place(request.out, out_, same ? memory : after);
    mine_.in = in_;
    mine_.out = out_;
    for (std::size_t i = 0; i < in_.size(); ++i) {
      stream.copy(in_[i].data, request.in[i].data, in_[i].bytes);
    }
  }
  const Request& request() const { return mine_; }
  void bring(const Request& request) const {
    for (std::size_t i = 0; i < out_.size(); ++i) {
      stream_.copy(request.out[i].data, out_[i].data, out_[i].bytes);
    }
  }

 private:
  static std::byte* place(std::span<const Block> blocks, std::vector<Block>& to, std::byte* at) {
    for (const Block& block : blocks) {
      to.push_back({at, block.bytes});
      at += block.bytes;
    }
    return at;
  }
  const gpu::OwnStream& stream_;
  std::vector<Block> in_;
  std::vector<Block> out_;
  Request mine_;
};

inline void run_on(gpu::Group& group, const gpu::OwnStream& stream, const Request& request,
                   std::byte* memory) {
  const OnDevice there(stream, request, memory);
  group.run(there.request(), stream.get());
  stream.wait();
  if (const auto failed = group.failure()) throw *failed;
  there.bring(request);
}

}  // namespace dreamcomm::testing
