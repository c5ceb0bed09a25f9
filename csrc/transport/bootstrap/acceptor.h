// Accepts connections to a rank's address during bootstrap, on its own thread, and refuses those
// that are not from ranks. Connections that send something, or end, delay no other. A connection
// that sends nothing occupies one of 64 places for a second.
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

/// Any local process can find the address and connect. Connections of other users are closed at
/// once, before anything is read or sent. A connection is also closed if it does not begin with a
/// handshake that has this rank's nonce, or sends nothing for a second.
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

  /// Returns the next accepted peer, or nothing at the deadline. Throws the error that ended the
  /// thread.
  std::optional<AcceptedPeer> next(SocketDeadline deadline);
  /// Records a refused process and the reason: it connected here, or listens where a rank was
  /// expected.
  void refuse(const Fd& socket, const std::string& why);
  /// Describes the refused processes and the reasons: the first few, and how many more.
  std::string refused() const;

 private:
  struct Silent {
    Fd socket;
    SocketDeadline until;
  };

  void work();
  bool wait();
  void accept();
  void read_handshake(Silent& silent);

  const Nonce own_;
  Fd listener_;
  Fd stop_;  // becomes readable when the thread is to end
  std::list<Silent> silent_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<AcceptedPeer> accepted_;
  std::vector<std::string> words_;  // the first refusals
  std::size_t refusals_ = 0;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace dreamcomm
