#include "transport/os/unix_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include "core/error.h"

namespace dreamcomm {
namespace {

[[noreturn]] void fail(const char* what) {
  const std::string hint = errno == EMFILE ? " (raise the limit: ulimit -n)" : "";
  throw Error(ErrorKind::kSystem,
              concat(what, " failed: ", std::generic_category().message(errno), hint));
}

struct Address {
  sockaddr_un value{};
  socklen_t size = 0;
};

// A leading zero byte makes the address abstract: it belongs to the network
// namespace, needs no file and vanishes with the socket.
Address abstract_address(const std::string& name) {
  Address address;
  address.value.sun_family = AF_UNIX;
  check(name.size() < sizeof address.value.sun_path - 1, ErrorKind::kInvalid,
        "socket name too long: ", name);
  std::memcpy(address.value.sun_path + 1, name.data(), name.size());
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// Packets keep a message and its descriptor together.
Fd make_socket() {
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) fail("socket(AF_UNIX)");
  return fd;
}

constexpr std::size_t kControl = CMSG_SPACE(sizeof(int));

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

bool readable(const Fd& fd, SocketDeadline deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    const int wait = static_cast<int>(std::clamp<long long>(left.count(), 0, 1000));
    pollfd poll_one{fd.get(), POLLIN, 0};
    const int ready = poll(&poll_one, 1, wait);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) fail("poll");
    if (ready == 0 && left.count() <= 1000) return false;
  }
}

Fd listen_at(const std::string& name, int backlog) {
  Fd fd = make_socket();
  const Address address = abstract_address(name);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address.value), address.size) != 0) {
    fail("bind");
  }
  if (listen(fd.get(), backlog) != 0) fail("listen");
  return fd;
}

std::optional<Fd> connect_to(const std::string& name) {
  Fd fd = make_socket();
  const Address address = abstract_address(name);
  while (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.value), address.size) != 0) {
    if (errno != EINTR) return std::nullopt;
  }
  return fd;
}

std::optional<Fd> accept_from(const Fd& listener, SocketDeadline deadline) {
  while (readable(listener, deadline)) {
    Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (fd) return fd;
    if (errno != EINTR && errno != ECONNABORTED && errno != EAGAIN) fail("accept");
  }
  return std::nullopt;
}

PeerProcess peer_process(const Fd& socket) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    fail("getsockopt(SO_PEERCRED)");
  }
  return {credentials.pid, credentials.uid};
}

bool is_own_user(const PeerProcess& process) { return process.uid == geteuid(); }

bool send_with_fd(const Fd& socket, const void* data, std::size_t size, const Fd& fd) {
  iovec bytes{const_cast<void*>(data), size};
  alignas(cmsghdr) std::byte control[kControl]{};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int raw = fd.get();
  std::memcpy(CMSG_DATA(header), &raw, sizeof raw);
  while (true) {
    const ssize_t sent = sendmsg(socket.get(), &message, MSG_NOSIGNAL);
    if (sent >= 0) return static_cast<std::size_t>(sent) == size;
    if (errno == EPIPE || errno == ECONNRESET) return false;
    if (errno != EINTR) fail("sendmsg");
  }
}

bool receive_with_fd(const Fd& socket, void* data, std::size_t size, Fd& fd,
                     SocketDeadline deadline) {
  if (!readable(socket, deadline)) return false;
  iovec bytes{data, size};
  alignas(cmsghdr) std::byte control[kControl]{};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = 0;
  do {
    got = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno != ECONNRESET) fail("recvmsg");
  // All descriptors are owned at once, so that a bad message leaks none. The kernel closes those
  // that did not fit.
  std::vector<Fd> received;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int raw = -1;
      std::memcpy(&raw, CMSG_DATA(header) + i * sizeof raw, sizeof raw);
      received.emplace_back(raw);
    }
  }
  if (got != static_cast<ssize_t>(size) || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 ||
      received.size() != 1) {
    return false;
  }
  fd = std::move(received.front());
  return true;
}

bool hung_up(const Fd& socket) {
  pollfd poll_one{socket.get(), POLLIN | POLLRDHUP, 0};
  return poll(&poll_one, 1, 0) > 0 && (poll_one.revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0;
}

Fd watch_process(pid_t pid) {
  if (pid <= 0) return Fd();
#ifdef SYS_pidfd_open
  return Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
#else
  return Fd();
#endif
}

bool has_ended(const Fd& watched) {
  if (!watched) return false;
  pollfd poll_one{watched.get(), POLLIN, 0};
  return poll(&poll_one, 1, 0) > 0 && (poll_one.revents & POLLIN) != 0;
}

}  // namespace dreamcomm
