// A group whose ranks are processes that map each other's memfds.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "transport/fabric.h"
#include "transport/introspect/call_site_query.h"
#include "transport/introspect/process_state.h"
#include "transport/introspect/window_reader.h"
#include "transport/os/memfd.h"
#include "transport/os/unix_socket.h"
#include "transport/shm/heap.h"

namespace dreamcomm {

/// A rank's handles of another rank's process and memory.
struct ShmPeer {
  Fd socket;
  Fd process;
  Mapping window;
  std::shared_ptr<const Mapping> heap;
  std::shared_ptr<void> line{};  // watches the socket; it must end first
};

class ShmFabric final : public Fabric {
 public:
  /// `fd`: the own window, kept open for tools of the same user (introspect/window_reader.h).
  ShmFabric(int rank, const WindowLayout& layout, Fd fd, Mapping own, std::shared_ptr<Heap> heap,
            std::vector<ShmPeer> peers, std::string words,
            std::shared_ptr<CallSiteService> call_sites)
      : Fabric(rank, layout),
        fd_(std::move(fd)),
        own_(std::move(own)),
        heap_(std::move(heap)),
        peers_(std::move(peers)),
        words_(std::move(words)),
        call_sites_(std::move(call_sites)) {
    if (!call_sites_) return;
    for (ShmPeer& other : peers_) {
      if (other.socket) other.line = call_sites_->listen(other.socket);
    }
  }

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
    const bool gone = hung_up(other.socket) || has_ended(r);
    return gone ? PeerState::kGone : PeerState::kAlive;
  }
  bool has_ended(int r) const override {
    return dreamcomm::has_ended(peers_[static_cast<std::size_t>(r)].process);
  }
  bool has_stopped(int r) const override {
    const pid_t pid =
        r == rank() ? 0 : peer_process(peers_[static_cast<std::size_t>(r)].socket).pid;
    return pid > 0 && is_stopped(pid);
  }
  void inquire(int r) const override {
    const Fd& socket = peers_[static_cast<std::size_t>(r)].socket;
    if (call_sites_ && socket) call_sites_->inquire(socket);
  }
  std::string other_activity(int r, bool inside,
                             std::chrono::milliseconds patience) const override {
    if (r == rank()) return "";
    const Fd& socket = peers_[static_cast<std::size_t>(r)].socket;
    const pid_t pid = peer_process(socket).pid;
    const std::string words = describe_process(pid, view_of(header(rank())).team, inside);
    if (!call_sites_ || is_stopped(pid)) return words;
    const std::string at = call_sites_->ask(socket, patience);
    return at.empty() ? words : concat(words, "; its main thread is", at);
  }
  std::string describe() const override { return words_; }

 private:
  Fd fd_;
  Mapping own_;
  std::shared_ptr<Heap> heap_;
  std::vector<ShmPeer> peers_;
  std::string words_;
  std::shared_ptr<CallSiteService> call_sites_;
};

}  // namespace dreamcomm
