// Keeps strangers out: takes every connection to a rank's address while the ranks meet, on a
// thread of its own. Many that say something, or end, hold up nobody; who says nothing has one of
// 64 places for a second.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "transport/bootstrap/handshake.h"
#include "transport/os/unix_socket.h"

namespace dreamcomm {

/// Any local process can find the address and connect. Those of other users are closed at once,
/// before anything is heard or said; what does not begin with a greeting that knows this rank's
/// nonce, or says nothing for a second, likewise.
class Acceptor {
 public:
  struct AcceptedPeer {
    Fd socket;
    Handshake handshake;  // for this rank, of this version; which rank sent it is not checked
    Fd memory;
  };

  /// Listens at the abstract address. Throws Error(kSystem).
  Acceptor(const std::string& address, const Nonce& own);
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  /// The next guest, or nothing at the deadline. Throws what ended the thread.
  std::optional<AcceptedPeer> next(SocketDeadline deadline);
  /// Notes who is refused, and why: one at the door, or at an address where a rank was looked for.
  void refuse(const Fd& socket, const std::string& why);
  /// In words, who was refused and why: the first few, and how many more.
  std::string refused() const;

 private:
  struct Silent {
    Fd socket;
    SocketDeadline until;
  };

  void work();
  bool wait();
  void let_in();
  void hear(Silent& silent);

  const Nonce own_;
  Fd listener_;
  Fd stop_;  // becomes readable when the thread is to end
  std::list<Silent> silent_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<AcceptedPeer> guests_;
  std::vector<std::string> words_;  // of the first that were refused
  std::size_t refusals_ = 0;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace dreamcomm
