// Unix sockets between processes of one host, and the descriptors they carry.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>

namespace dreamcomm {

/// An open file descriptor, closed with the object.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

using SocketDeadline = std::chrono::steady_clock::time_point;

/// Listens on an abstract address (no file) with `name`.
Fd listen_at(const std::string& name, int backlog);
/// Connects to it, or returns nothing if no socket listens there on this host.
std::optional<Fd> connect_to(const std::string& name);
/// The next connection, or nothing at the deadline.
std::optional<Fd> accept_from(const Fd& listener, SocketDeadline deadline);

/// The process at the other end, as the kernel knows it.
struct PeerProcess {
  pid_t pid = 0;
  uid_t uid = 0;
};
PeerProcess peer_process(const Fd& socket);
/// True if it runs as the user that this process runs as.
bool is_own_user(const PeerProcess& process);

/// Sends `size` bytes and one descriptor along with them. False if the peer hung up.
bool send_with_fd(const Fd& socket, const void* data, std::size_t size, const Fd& fd);
/// Receives exactly `size` bytes and the descriptor; false if the peer hung up,
/// sent fewer bytes, sent no descriptor, or the deadline passed.
bool receive_with_fd(const Fd& socket, void* data, std::size_t size, Fd& fd,
                     SocketDeadline deadline);

/// True if the other end has closed the connection. Does not wait.
bool hung_up(const Fd& socket);

/// Waits until the descriptor is readable; false at the deadline.
bool readable(const Fd& fd, SocketDeadline deadline);

/// A descriptor that becomes readable when the process ends; empty where the
/// kernel or the pid namespace does not give one.
Fd watch_process(pid_t pid);
/// True if the watched process has ended. False for an empty descriptor.
bool has_ended(const Fd& watched);

}  // namespace dreamcomm
