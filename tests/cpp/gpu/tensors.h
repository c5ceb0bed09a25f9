// Calls whose tensors lie elsewhere, as on a device, and are checked here.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "core/request.h"

namespace dreamcomm::testing {

inline std::size_t bytes_of(const Request& request) {
  std::size_t bytes = 0;
  for (const Block& block : request.in) bytes += block.bytes;
  for (const Block& block : request.out) bytes += block.bytes;
  return bytes;
}

/// A call's tensors in memory that is given, block after block.
class Copied {
 public:
  using Copy = std::function<void(void* to, const void* from, std::size_t bytes)>;

  Copied(const Request& request, std::byte* memory, Copy copy)
      : copy_(std::move(copy)), here_(request), there_(request) {
    const bool same =
        !request.in.empty() && !request.out.empty() && request.in[0].data == request.out[0].data;
    std::byte* const after = place(request.in, in_, memory);
    place(request.out, out_, same ? memory : after);
    there_.in = in_;
    there_.out = out_;
    for (std::size_t i = 0; i < in_.size(); ++i) {
      copy_(in_[i].data, request.in[i].data, in_[i].bytes);
    }
  }
  Copied(const Copied&) = delete;
  Copied& operator=(const Copied&) = delete;

  /// The call on the copies.
  const Request& request() const { return there_; }
  /// Copies the outputs back to the call's own tensors.
  void bring() const {
    for (std::size_t i = 0; i < out_.size(); ++i) {
      copy_(here_.out[i].data, out_[i].data, out_[i].bytes);
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
  Copy copy_;
  Request here_;
  Request there_;
  std::vector<Block> in_;
  std::vector<Block> out_;
};

}  // namespace dreamcomm::testing
