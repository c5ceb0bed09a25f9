#include "transport/introspect/call_site_query.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/error.h"
#include "core/signals.h"
#include "core/text.h"

namespace dreamcomm {
namespace {

constexpr std::size_t kMostQuestions = 256;  // waiting at a time; more go unanswered
constexpr int kMostEvents = 16;

/// After so long a question, or its answer, counts as lost.
constexpr std::chrono::milliseconds kLost{30'000};

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

std::shared_ptr<CallSiteService> CallSiteService::make(Tell tell, std::chrono::milliseconds fresh) {
  const std::shared_ptr<CallSiteService> self(new CallSiteService(std::move(tell), fresh));
  self->start();
  return {self.get(), [last = self](CallSiteService*) mutable {
            last->stop();
            last.reset();  // a weak pointer would keep it here
          }};
}

CallSiteService::CallSiteService(Tell tell, std::chrono::milliseconds fresh)
    : tell_(std::move(tell)),
      fresh_(fresh),
      events_(made(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      bell_(made(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
  check(watch(events_, bell_.get(), kOwn), ErrorKind::kSystem,
        "epoll_ctl failed: ", std::generic_category().message(errno));
}

void CallSiteService::start() {
  try {
    thread_ = std::thread([self = shared_from_this()] {
      block_signals();
      self->work();
    });
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::kSystem, concat("cannot start a thread: ", error.what()));
  }
}

void CallSiteService::stop() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  wake();
  const std::scoped_lock lock(ending_);
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();  // it keeps the object until it ends
  } else {
    thread_.join();
  }
}

void CallSiteService::wake() const { eventfd_write(bell_.get(), 1); }

std::shared_ptr<void> CallSiteService::listen(const Fd& socket) {
  const std::scoped_lock lock(mutex_);
  const Line line = ++last_line_;
  if (!watch(events_, socket.get(), line)) return nullptr;
  lines_[line] = socket.get();
  return {this, [self = shared_from_this(), line](void*) { self->hang_up(line); }};
}

void CallSiteService::hang_up(Line line) {
  const std::scoped_lock lock(mutex_);
  const auto found = lines_.find(line);
  const int fd = found->second;
  epoll_ctl(events_.get(), EPOLL_CTL_DEL, fd, nullptr);
  lines_.erase(found);
  sent_.erase(fd);
}

/// Returns the last question if its answer is fresh enough, or a new one; null if that cannot be
/// sent. An answer that was not fetched in time is not used: the program has continued. Needs the
/// lock.
std::shared_ptr<CallSiteService::Answer> CallSiteService::question(int fd) {
  const Time now = std::chrono::steady_clock::now();
  const auto last = sent_.find(fd);
  if (last != sent_.end()) {
    const Answer& answer = *last->second.answer;
    const auto age = now - answer.asked;
    if (!answer.told && age < (answer.text ? fresh_ : kLost)) return last->second.answer;
  }
  const std::uint32_t number = ++last_number_;
  if (!write(fd, Sort::kQuestion, number, "")) return nullptr;
  auto answer = std::make_shared<Answer>(Answer{.asked = now});
  sent_[fd] = {number, answer};
  return answer;
}

void CallSiteService::inquire(const Fd& socket) {
  const std::scoped_lock lock(mutex_);
  question(socket.get());
}

std::string CallSiteService::ask(const Fd& socket, std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  const std::shared_ptr<Answer> answer = question(socket.get());
  if (!answer || (answer->in_vain && !answer->text)) return "";
  return await(lock, *answer, patience);
}

std::string CallSiteService::own(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  const std::uint32_t number = ++last_number_;
  const auto answer = std::make_shared<Answer>();
  own_[number] = answer;
  questions_.push_back({kOwn, number});
  wake();
  const std::string text = await(lock, *answer, patience);
  own_.erase(number);
  return text;
}

void CallSiteService::post(std::function<void()> job) {
  const std::scoped_lock lock(mutex_);
  jobs_.push_back(std::move(job));
  wake();
}

void CallSiteService::do_jobs() {
  std::vector<std::function<void()>> jobs;
  {
    const std::scoped_lock lock(mutex_);
    jobs.swap(jobs_);
  }
  for (const std::function<void()>& job : jobs) job();
}

std::string CallSiteService::await(std::unique_lock<std::mutex>& lock, Answer& answer,
                                   std::chrono::milliseconds patience) {
  changed_.wait_for(lock, patience, [&] { return stopping_ || answer.text.has_value(); });
  (answer.text ? answer.told : answer.in_vain) = true;
  return answer.text.value_or("");
}

/// Needs the lock. An answer that a caller waited for in vain is old by now. Only callers that
/// still wait get it; later callers ask again.
void CallSiteService::take_answer(int fd, std::uint32_t number, std::string text) {
  const auto last = sent_.find(fd);
  if (last == sent_.end() || last->second.number != number) return;
  Answer& answer = *last->second.answer;
  answer.text = std::move(text);
  answer.told = answer.told || answer.in_vain;
  changed_.notify_all();
}

/// Never waits: a process that does not read must not delay others.
bool CallSiteService::write(int fd, Sort sort, std::uint32_t number, const std::string& text) {
  Query query{.sort = sort, .number = number};
  put_text(query.text, text);
  return send(fd, &query, sizeof query, MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(sizeof query);
}

void CallSiteService::work() {
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
    do_jobs();
    {
      const std::scoped_lock lock(mutex_);
      if (stopping_) return;
    }
    answer();
  }
}

// INVARIANT: a descriptor is used under the lock and while its line is listed. So it is not used
// after it was closed, or reopened for something else.
void CallSiteService::read(Line line) {
  const std::scoped_lock lock(mutex_);
  const auto found = lines_.find(line);
  if (found == lines_.end()) return;
  const int fd = found->second;
  while (true) {
    Query query;
    const ssize_t got = recv(fd, &query, sizeof query, MSG_DONTWAIT | MSG_TRUNC);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) {  // the other side has ended: epoll would report it forever
      epoll_ctl(events_.get(), EPOLL_CTL_DEL, fd, nullptr);
      return;
    }
    if (got != static_cast<ssize_t>(sizeof query)) continue;
    query.text.back() = '\0';
    if (query.sort == Sort::kAnswer) take_answer(fd, query.number, query.text.data());
    if (query.sort == Sort::kQuestion && questions_.size() < kMostQuestions) {
      questions_.push_back({line, query.number});
    }
  }
}

void CallSiteService::answer() {
  std::vector<Question> questions;
  {
    const std::scoped_lock lock(mutex_);
    questions.swap(questions_);
  }
  if (questions.empty()) return;
  const std::string text = tell_();
  const std::scoped_lock lock(mutex_);
  for (const Question& one : questions) {
    const auto own = own_.find(one.number);
    if (one.from == kOwn && own != own_.end()) {
      own->second->text = text;
      changed_.notify_all();
    }
    const auto line = lines_.find(one.from);
    if (line != lines_.end()) write(line->second, Sort::kAnswer, one.number, text);
  }
}

}  // namespace dreamcomm
