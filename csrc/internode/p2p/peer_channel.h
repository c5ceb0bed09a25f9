// Messages with one rank of another host: what is written to it, what it writes, and the threads
// that wait for both.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>

#include "transport/link.h"

namespace dreamcomm {

/// Goes ahead of a message's bytes, with them if they are few, or tells of what became of it.
struct MessageHeader {
  enum class About : std::uint32_t { kMessage, kTaken, kRefused };
  About about = About::kMessage;
  std::uint32_t number = 0;    // of the message among those of its direction
  std::uint64_t tag = 0;       // the caller's
  std::uint64_t bytes = 0;     // of the message
  std::uint64_t expected = 0;  // by the receive that refused it

  static constexpr std::size_t kInline = 4096;  // so many bytes go with it
  bool is_whole() const { return bytes <= kInline; }
};

/// INVARIANT: what is followed ends without further calls on either rank, but for the first letter,
/// which needs the other rank to have begun to listen: bytes are followed when both ranks have
/// begun to move them, and who listens takes every letter. A rank listens to those that it sends
/// to or may receive from, so a letter that has not left holds back nothing that could end.
class PeerChannel {
 public:
  /// On the threads of this peer; neither may throw.
  struct Events {
    std::function<void(const MessageHeader& header, std::span<const std::byte> bytes)> arrived;
    std::function<void(const std::string& reason)> lost;  // once; nothing more will come
  };
  using Done = std::function<void(std::exception_ptr failure)>;

  /// `link` must outlive this.
  PeerChannel(Link& link, int rank, Events events);
  ~PeerChannel();  // ends the waits
  PeerChannel(const PeerChannel&) = delete;
  PeerChannel& operator=(const PeerChannel&) = delete;

  /// All three begin at once and throw Error(kPeerLost).
  void write(const MessageHeader& header, std::span<const std::byte> bytes, Done done);
  std::shared_ptr<Parcel> send(const Cargo& cargo, std::uint32_t number);
  std::shared_ptr<Parcel> receive(const Cargo& cargo, std::uint32_t number);
  /// Runs `done` on this peer's thread when the parcel has come or gone: in the order followed.
  void follow(std::shared_ptr<Parcel> parcel, Done done);

  /// Lets the threads end soon. Any thread.
  void end();

 private:
  struct Followed {
    std::shared_ptr<Parcel> parcel;
    Done done;
  };
  void listen();
  void work();
  void hurry();
  bool wait(std::shared_ptr<Parcel>& awaited, const std::shared_ptr<Parcel>& parcel);

  Link& link_;
  const int rank_;
  const Events events_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Followed> followed_;
  std::shared_ptr<Parcel> heard_;  // what each thread waits for
  std::shared_ptr<Parcel> awaited_;
  int running_ = 0;
  bool ending_ = false;
  std::string lost_;  // why, once no more letters come: what is followed has a moment then
  std::thread listener_;
  std::thread worker_;
};

}  // namespace dreamcomm
