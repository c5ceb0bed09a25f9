// Messages with one rank of another host: outgoing and incoming headers and bytes, and the threads
// that wait for them.
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

/// Precedes a message's bytes, and contains them if they are few; or reports the message's fate.
struct MessageHeader {
  enum class About : std::uint32_t { kMessage, kTaken, kRefused };
  About about = About::kMessage;
  std::uint32_t number = 0;    // of the message in its direction
  std::uint64_t tag = 0;       // the caller's
  std::uint64_t bytes = 0;     // of the message
  std::uint64_t expected = 0;  // what the receive that refused it expects

  static constexpr std::size_t kInline = 4096;  // this many bytes fit into its packet
  bool is_whole() const { return bytes <= kInline; }
};

/// INVARIANT: a followed parcel ends without further calls on either rank, except the first header,
/// for which the other rank must have begun to listen. Bytes are followed when both ranks have
/// begun to move them, and a listening rank takes every header. A rank listens to those that it
/// sends to or may receive from, so a header that is not sent yet delays nothing that could end.
class PeerChannel {
 public:
  /// Called on the threads of this peer; neither may throw.
  struct Events {
    std::function<void(const MessageHeader& header, std::span<const std::byte> bytes)> arrived;
    std::function<void(const std::string& reason)> lost;  // once; nothing more will arrive
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
  /// Runs `done` on this peer's thread when the parcel has ended: in the order followed.
  void follow(std::shared_ptr<Parcel> parcel, Done done);

  /// Makes the threads end soon. Any thread.
  void end();

 private:
  struct Followed {
    std::shared_ptr<Parcel> parcel;
    Done done;
  };
  void listen();
  void work();
  void interrupt_waits();
  bool wait(std::shared_ptr<Parcel>& awaited, const std::shared_ptr<Parcel>& parcel);

  Link& link_;
  const int rank_;
  const Events events_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Followed> followed_;
  std::shared_ptr<Parcel> receiving_;  // what each thread waits for
  std::shared_ptr<Parcel> awaited_;
  int running_ = 0;
  bool ending_ = false;
  std::string lost_;  // why, once no more headers arrive; followed parcels still get a moment
  std::thread listener_;
  std::thread worker_;
};

}  // namespace dreamcomm
