#include "transport/whereabouts.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/error.h"
#include "core/signals.h"

namespace dreamcomm {
namespace {

constexpr std::size_t kMostQuestions = 256;  // waiting at a time; more go unanswered
constexpr int kMostEvents = 16;

Fd made(int fd, const char* what) {
  check(fd >= 0, ErrorKind::kSystem, what, " failed: ", std::generic_category().message(errno));
  return Fd(fd);
}

bool watch(const Fd& events, int fd, std::uint64_t name) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = name;
  return epoll_ctl(events.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace

std::shared_ptr<Whereabouts> Whereabouts::make(Tell tell) {
  return std::shared_ptr<Whereabouts>(new Whereabouts(std::move(tell)));
}

Whereabouts::Whereabouts(Tell tell)
    : tell_(std::move(tell)),
      events_(made(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      bell_(made(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
  check(watch(events_, bell_.get(), kOwn), ErrorKind::kSystem,
        "epoll_ctl failed: ", std::generic_category().message(errno));
  try {
    thread_ = std::thread([this] {
      block_signals();
      work();
    });
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::kSystem, concat("cannot start a thread: ", error.what()));
  }
}

Whereabouts::~Whereabouts() { stop(); }

void Whereabouts::stop() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  wake();
  const std::scoped_lock lock(ending_);
  if (thread_.joinable()) thread_.join();
}

void Whereabouts::wake() const { eventfd_write(bell_.get(), 1); }

std::shared_ptr<void> Whereabouts::listen(const Fd& socket) {
  const int fd = socket.get();
  const std::scoped_lock lock(mutex_);
  const Line line = ++last_line_;
  check(watch(events_, fd, line), ErrorKind::kSystem,
        "epoll_ctl failed: ", std::generic_category().message(errno));
  lines_[line] = fd;
  return {this, [self = shared_from_this(), line](void*) {
            const std::scoped_lock closing(self->mutex_);
            const auto found = self->lines_.find(line);
            epoll_ctl(self->events_.get(), EPOLL_CTL_DEL, found->second, nullptr);
            self->silent_.erase(found->second);
            self->lines_.erase(found);
          }};
}

std::string Whereabouts::ask(const Fd& socket, std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  const auto [silent, is_first] = silent_.insert(socket.get());
  if (!is_first) return "";
  const std::uint32_t number = ++last_number_;
  asked_.emplace(number, std::nullopt);
  if (!post(socket.get(), Sort::kQuestion, number, "")) return "";
  return await(lock, number, patience);
}

std::string Whereabouts::own(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  const std::uint32_t number = ++last_number_;
  asked_.emplace(number, std::nullopt);
  questions_.push_back({kOwn, number});
  wake();
  return await(lock, number, patience);
}

std::string Whereabouts::await(std::unique_lock<std::mutex>& lock, std::uint32_t number,
                               std::chrono::milliseconds patience) {
  changed_.wait_for(lock, patience, [&] { return stopping_ || asked_.at(number).has_value(); });
  const auto found = asked_.find(number);
  std::string text = found->second.value_or("");
  asked_.erase(found);
  return text;
}

/// Under the lock. What nobody waits for any more is dropped.
void Whereabouts::settle(std::uint32_t number, std::string text) {
  const auto found = asked_.find(number);
  if (found == asked_.end()) return;
  found->second = std::move(text);
  changed_.notify_all();
}

/// Never waits: a process that does not read must not hold up one that does.
bool Whereabouts::post(int fd, Sort sort, std::uint32_t number, const std::string& text) {
  Letter letter{.sort = sort, .number = number};
  text.copy(letter.text.data(), letter.text.size() - 1);
  return send(fd, &letter, sizeof letter, MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(sizeof letter);
}

void Whereabouts::work() {
  while (true) {
    std::array<epoll_event, kMostEvents> events{};
    const int count = epoll_wait(events_.get(), events.data(), kMostEvents, -1);
    for (int i = 0; i < count; ++i) {
      const Line line = events[static_cast<std::size_t>(i)].data.u64;
      if (line != kOwn) {
        read(line);
        continue;
      }
      eventfd_t rings = 0;
      eventfd_read(bell_.get(), &rings);
    }
    {
      const std::scoped_lock lock(mutex_);
      if (stopping_) return;
    }
    answer();
  }
}

// INVARIANT: a descriptor is used under the lock and while its line is listed, so not after it was
// closed, or opened anew for something else.
void Whereabouts::read(Line line) {
  const std::scoped_lock lock(mutex_);
  const auto found = lines_.find(line);
  if (found == lines_.end()) return;
  const int fd = found->second;
  while (true) {
    Letter letter;
    const ssize_t got = recv(fd, &letter, sizeof letter, MSG_DONTWAIT | MSG_TRUNC);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) {  // the other side has gone, and would be told of for ever
      epoll_ctl(events_.get(), EPOLL_CTL_DEL, fd, nullptr);
      return;
    }
    if (got != static_cast<ssize_t>(sizeof letter)) continue;
    letter.text.back() = '\0';
    if (letter.sort == Sort::kAnswer) {
      silent_.erase(fd);
      settle(letter.number, letter.text.data());
    }
    if (letter.sort == Sort::kQuestion && questions_.size() < kMostQuestions) {
      questions_.push_back({line, letter.number});
    }
  }
}

void Whereabouts::answer() {
  std::vector<Question> questions;
  {
    const std::scoped_lock lock(mutex_);
    questions.swap(questions_);
  }
  if (questions.empty()) return;
  const std::string text = tell_();
  const std::scoped_lock lock(mutex_);
  for (const Question& one : questions) {
    if (one.from == kOwn) settle(one.number, text);
    const auto line = lines_.find(one.from);
    if (line != lines_.end()) post(line->second, Sort::kAnswer, one.number, text);
  }
}

}  // namespace dreamcomm
