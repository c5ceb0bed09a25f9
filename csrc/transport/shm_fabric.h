// A group whose ranks are processes that map each other's memfds.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/elsewhere.h"
#include "transport/fabric.h"
#include "transport/heap.h"
#include "transport/memfd.h"
#include "transport/observe.h"
#include "transport/socket.h"

namespace dreamcomm {

/// What a rank holds of another.
struct ShmPeer {
  Fd socket;
  Fd process;
  Mapping window;
  std::shared_ptr<const Mapping> heap;
};

class ShmFabric final : public Fabric {
 public:
  /// `fd`: of the own window, kept open for tools of the same user (observe.h).
  ShmFabric(int rank, const WindowLayout& layout, Fd fd, Mapping own, std::shared_ptr<Heap> heap,
            std::vector<ShmPeer> peers, std::string words)
      : Fabric(rank, layout),
        fd_(std::move(fd)),
        own_(std::move(own)),
        heap_(std::move(heap)),
        peers_(std::move(peers)),
        words_(std::move(words)) {}

  std::byte* window(int r) const override {
    return r == rank() ? own_.data() : peers_[static_cast<std::size_t>(r)].window.data();
  }
  std::span<std::byte> heap(int r) const override {
    if (r == rank()) {
      return heap_ ? std::span(heap_->data(), heap_->bytes()) : std::span<std::byte>();
    }
    const Mapping* theirs = peers_[static_cast<std::size_t>(r)].heap.get();
    return theirs ? std::span(theirs->data(), theirs->bytes()) : std::span<std::byte>();
  }
  PeerState peer(int r) const override {
    if (r == rank()) return PeerState::kAlive;
    const ShmPeer& other = peers_[static_cast<std::size_t>(r)];
    const bool gone = hung_up(other.socket) || has_ended(other.process);
    return gone ? PeerState::kGone : PeerState::kAlive;
  }
  std::string elsewhere(int r) const override {
    if (r == rank()) return "";
    return words_on_process(peer_process(peers_[static_cast<std::size_t>(r)].socket).pid,
                            view_of(header(rank())).team);
  }
  std::string describe() const override { return words_; }

 private:
  Fd fd_;
  Mapping own_;
  std::shared_ptr<Heap> heap_;
  std::vector<ShmPeer> peers_;
  std::string words_;
};

}  // namespace dreamcomm
