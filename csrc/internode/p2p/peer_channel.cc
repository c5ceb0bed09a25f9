#include "internode/p2p/peer_channel.h"

#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/signals.h"

namespace dreamcomm {
namespace {

constexpr std::uint32_t kHeaderTag = Link::kMostTag;
constexpr std::chrono::milliseconds kMoment{50};
constexpr std::size_t kLongest = sizeof(MessageHeader) + MessageHeader::kInline;

/// The tag of a message's bytes. It allows far more messages than can be under way.
std::uint32_t tag_of(std::uint32_t number) { return number & (Link::kMostTag >> 1U); }

Cargo room(std::size_t bytes) {
  return {{new std::byte[bytes], std::default_delete<std::byte[]>()}, 0, bytes};
}

}  // namespace

PeerChannel::PeerChannel(Link& link, int rank, Events events)
    : link_(link), rank_(rank), events_(std::move(events)) {
  const auto run = [this](void (PeerChannel::*act)()) {
    return std::thread([this, act] {
      block_signals();
      (this->*act)();
      const std::scoped_lock lock(mutex_);
      --running_;
      changed_.notify_all();
    });
  };
  running_ = 2;
  try {
    worker_ = run(&PeerChannel::work);
    listener_ = run(&PeerChannel::listen);
  } catch (const std::system_error& error) {
    end();
    if (worker_.joinable()) worker_.join();
    throw Error(ErrorKind::kSystem,
                concat("no thread for messages with rank ", rank, ": ", error.what()));
  }
}

/// An interrupt may come just before the wait that it is to end, so it is repeated.
PeerChannel::~PeerChannel() {
  std::unique_lock lock(mutex_);
  while (running_ > 0) {
    lock.unlock();
    end();
    lock.lock();
    changed_.wait_for(lock, std::chrono::milliseconds(1), [this] { return running_ == 0; });
  }
  lock.unlock();
  listener_.join();
  worker_.join();
}

void PeerChannel::end() {
  const std::scoped_lock lock(mutex_);
  ending_ = true;
  if (receiving_) receiving_->interrupt();
  if (awaited_) awaited_->interrupt();
  changed_.notify_all();
}

void PeerChannel::write(const MessageHeader& header, std::span<const std::byte> bytes, Done done) {
  const Cargo cargo = room(sizeof header + bytes.size());
  std::memcpy(cargo.data(), &header, sizeof header);
  if (!bytes.empty()) std::memcpy(cargo.data() + sizeof header, bytes.data(), bytes.size());
  follow(link_.send(rank_, cargo, kHeaderTag), std::move(done));
}

std::shared_ptr<Parcel> PeerChannel::send(const Cargo& cargo, std::uint32_t number) {
  return link_.send(rank_, cargo, tag_of(number));
}

std::shared_ptr<Parcel> PeerChannel::receive(const Cargo& cargo, std::uint32_t number) {
  return link_.receive(rank_, cargo, tag_of(number));
}

void PeerChannel::follow(std::shared_ptr<Parcel> parcel, Done done) {
  const std::scoped_lock lock(mutex_);
  followed_.push_back({std::move(parcel), std::move(done)});
  changed_.notify_all();
}

/// An engine may not report the end of a connection for a message that has arrived in part
/// (ConnectionMonitor). So this interrupts the other thread until it has nothing to wait for.
void PeerChannel::interrupt_waits() {
  std::unique_lock lock(mutex_);
  while (!ending_ && (awaited_ || !followed_.empty())) {
    changed_.wait_for(lock, kMoment);
    if (awaited_) awaited_->interrupt();
  }
}

/// Returns false if the channel is ending.
bool PeerChannel::wait(std::shared_ptr<Parcel>& awaited, const std::shared_ptr<Parcel>& parcel) {
  for (int misses = 0;;) {
    {
      const std::scoped_lock lock(mutex_);
      awaited = ending_ ? nullptr : parcel;
      if (ending_) return false;
    }
    const bool over = parcel->wait();
    const std::scoped_lock lock(mutex_);
    awaited = nullptr;
    if (over) return true;
    // A message that has arrived is reported by the second call at the latest.
    check(lost_.empty() || ++misses < 2, ErrorKind::kPeerLost, lost_);
  }
}

/// INVARIANT: the next header's receive begins before this header is handled. The receive writes to
/// the other rank, and must not do so after anything that lets that rank leave (ConnectionMonitor):
/// a header that says that its message was taken. A rank that has left already, because its last
/// message was small, is reported as lost after that message was handled.
void PeerChannel::listen() {
  try {
    Cargo next = room(kLongest);
    std::shared_ptr<Parcel> incoming = link_.receive(rank_, next, kHeaderTag);
    while (wait(receiving_, incoming)) {
      const Cargo cargo = std::exchange(next, room(kLongest));
      std::exception_ptr gone;
      try {
        incoming = link_.receive(rank_, next, kHeaderTag);
      } catch (const Error&) {
        gone = std::current_exception();
      }
      MessageHeader header;
      std::memcpy(&header, cargo.data(), sizeof header);
      const std::size_t bytes =
          header.about == MessageHeader::About::kMessage && header.is_whole() ? header.bytes : 0;
      events_.arrived(header, {cargo.data() + sizeof header, bytes});
      if (gone) std::rethrow_exception(gone);
    }
  } catch (const std::exception& error) {
    std::unique_lock lock(mutex_);
    receiving_ = nullptr;
    if (ending_) return;
    lost_ = error.what();
    lock.unlock();
    events_.lost(error.what());
    interrupt_waits();
  }
}

void PeerChannel::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || !followed_.empty(); });
    if (ending_) return;
    const Followed next = std::move(followed_.front());
    followed_.pop_front();
    lock.unlock();
    std::exception_ptr failure;
    bool over = false;
    try {
      over = wait(awaited_, next.parcel);
    } catch (const std::exception&) {
      failure = std::current_exception();
      over = true;
    }
    if (over && next.done) next.done(failure);
    lock.lock();
    awaited_ = nullptr;
  }
}

}  // namespace dreamcomm
