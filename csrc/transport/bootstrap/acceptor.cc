#include "transport/bootstrap/acceptor.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/signals.h"

namespace dreamcomm {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::seconds kPatience{1};
constexpr std::size_t kMostSilent = 64;  // at a time; more wait in the kernel's queue
constexpr std::size_t kMostWords = 3;
constexpr int kQueue = 4096;  // the kernel takes its own limit if that is less

/// Returns why a handshake is not one for the rank of this nonce, or "".
std::string objection(const Handshake& handshake, const Nonce& own) {
  if (handshake.magic != Handshake{}.magic) return "it sent no valid handshake";
  if (handshake.version != kProtocolVersion) {
    return concat("it runs a dreamcomm with protocol ", handshake.version,
                  ", this rank one with protocol ", kProtocolVersion);
  }
  return handshake.receiver == own ? "" : "it did not know the nonce of this rank";
}

}  // namespace

Acceptor::Acceptor(const std::string& address, const Nonce& own)
    : own_(own), listener_(listen_at(address, kQueue)), stop_(eventfd(0, EFD_CLOEXEC)) {
  check(static_cast<bool>(stop_), ErrorKind::kSystem,
        "eventfd failed: ", std::generic_category().message(errno));
  try {
    thread_ = std::thread([this] {
      block_signals();
      work();
    });
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::kSystem, concat("cannot start a thread: ", error.what()));
  }
}

Acceptor::~Acceptor() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

std::optional<Acceptor::AcceptedPeer> Acceptor::next(SocketDeadline deadline) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [this] { return !accepted_.empty() || failure_; });
  if (accepted_.empty()) {
    if (failure_) std::rethrow_exception(failure_);
    return std::nullopt;
  }
  AcceptedPeer accepted = std::move(accepted_.front());
  accepted_.pop_front();
  return accepted;
}

std::string Acceptor::refused() const {
  const std::scoped_lock lock(mutex_);
  std::string text;
  for (const std::string& words : words_) text += concat(text.empty() ? "" : "; ", words);
  if (refusals_ > words_.size()) text += concat("; and ", refusals_ - words_.size(), " more");
  return text;
}

void Acceptor::work() {
  try {
    while (wait()) {
    }
  } catch (...) {
    const std::scoped_lock lock(mutex_);
    failure_ = std::current_exception();
    changed_.notify_all();
  }
}

/// Waits for the next events and handles them; returns false when the thread is to end.
bool Acceptor::wait() {
  std::vector<pollfd> polled{{stop_.get(), POLLIN, 0}};
  const bool has_room = silent_.size() < kMostSilent;
  polled.push_back({has_room ? listener_.get() : -1, POLLIN, 0});
  for (const Silent& one : silent_) polled.push_back({one.socket.get(), POLLIN, 0});
  const int longest = silent_.empty() ? -1 : 100;  // milliseconds
  if (poll(polled.data(), polled.size(), longest) < 0 && errno != EINTR) {
    throw Error(ErrorKind::kSystem,
                concat("poll failed: ", std::generic_category().message(errno)));
  }
  if (polled[0].revents != 0) return false;
  std::size_t index = 2;
  for (auto one = silent_.begin(); one != silent_.end(); ++index) {
    const bool says = polled[index].revents != 0;
    const bool late = steady_clock::now() > one->until;
    if (says) read_handshake(*one);
    if (late && !says) refuse(one->socket, "it said nothing");
    one = says || late ? silent_.erase(one) : std::next(one);
  }
  if (polled[1].revents != 0) accept();
  return true;
}

void Acceptor::accept() {
  std::optional<Fd> socket = accept_from(listener_, steady_clock::now());
  if (!socket) return;
  if (!is_own_user(peer_process(*socket))) {
    return refuse(*socket, concat("it is another user's, and this rank user ", geteuid(), "'s"));
  }
  silent_.push_back({std::move(*socket), steady_clock::now() + kPatience});
}

void Acceptor::read_handshake(Silent& silent) {
  AcceptedPeer accepted;
  accepted.socket = std::move(silent.socket);
  const bool whole =
      receive_with_fd(accepted.socket, &accepted.handshake, sizeof accepted.handshake,
                      accepted.memory, steady_clock::now());
  const std::string why =
      whole ? objection(accepted.handshake, own_) : "it sent no valid handshake";
  if (!why.empty()) return refuse(accepted.socket, why);
  const std::scoped_lock lock(mutex_);
  accepted_.push_back(std::move(accepted));
  changed_.notify_all();
}

void Acceptor::refuse(const Fd& socket, const std::string& why) {
  const PeerProcess process = peer_process(socket);
  const std::scoped_lock lock(mutex_);
  if (++refusals_ <= kMostWords) {
    words_.push_back(concat("process ", process.pid, " of user ", process.uid, ": ", why));
  }
}

}  // namespace dreamcomm
