// Asks a peer's process for its Python call site, and answers peers: for messages about a late
// rank.
//
// The connection of two ranks stays open to detect a peer's end. It also carries questions and
// answers. One thread of the process reads those of all its groups, and sleeps otherwise.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/os/unix_socket.h"

namespace dreamcomm {

class CallSiteService : public std::enable_shared_from_this<CallSiteService> {
 public:
  /// Returns the program's position, as " at FILE:LINE in FUNCTION", or "". Called on the thread of
  /// the object; may wait for the interpreter. Must not throw.
  using Tell = std::function<std::string()>;

  /// The service stops when the last copy of the result is dropped, on any thread: `tell` may run
  /// the garbage collector, which may drop the last group. ask() uses the answer to an earlier
  /// inquire() if it is not older than `fresh`. Throws Error(kSystem).
  static std::shared_ptr<CallSiteService> make(Tell tell, std::chrono::milliseconds fresh = kFresh);
  CallSiteService(const CallSiteService&) = delete;
  CallSiteService& operator=(const CallSiteService&) = delete;

  /// Ends the thread: from then on nothing is answered or received. Waits for a running `tell`, so
  /// what that needs (the GIL) must not be held. Idempotent, any thread.
  void stop();

  /// Answers questions on the socket until the result is dropped, which must be before the socket
  /// is closed. Answers nothing if the system refuses to watch it.
  std::shared_ptr<void> listen(const Fd& socket);
  /// Returns the answer of the process at the other end of a watched socket, or "" if it does not
  /// answer within `patience`: it is stopped, or its interpreter is busy. A process that has not
  /// answered one question is not waited for again until it does, or some time has passed. Several
  /// threads may wait for one answer. Any thread.
  std::string ask(const Fd& socket, std::chrono::milliseconds patience);
  /// Sends the question of the next ask() ahead. Any thread.
  void inquire(const Fd& socket);
  /// This process's own answer: for threads that run no Python.
  std::string own(std::chrono::milliseconds patience);
  /// Runs `job` on the thread: for work that needs what `tell` may wait for. It must not throw. It
  /// runs unless the thread has ended.
  void post(std::function<void()> job);

 private:
  enum class Sort : std::uint32_t { kQuestion = 1, kAnswer = 2 };
  struct Query {
    Sort sort = Sort::kQuestion;
    std::uint32_t number = 0;  // of the question, counted by the asking process
    std::array<char, 504> text{};
  };
  using Line = std::uint64_t;  // a socket; unlike a descriptor, never reused
  static constexpr Line kOwn = 0;
  using Time = std::chrono::steady_clock::time_point;
  struct Answer {
    Time asked;
    std::optional<std::string> text{};
    bool in_vain = false;  // a caller has waited for it too long
    bool told = false;     // a caller has got it: later callers ask again
  };
  struct SentQuestion {
    std::uint32_t number = 0;
    std::shared_ptr<Answer> answer;
  };
  struct Question {
    Line from = kOwn;
    std::uint32_t number = 0;
  };

  static constexpr std::chrono::milliseconds kFresh{3000};

  CallSiteService(Tell tell, std::chrono::milliseconds fresh);
  void start();
  static bool write(int fd, Sort sort, std::uint32_t number, const std::string& text);
  void work();
  void read(Line line);
  void answer();
  void do_jobs();
  std::string await(std::unique_lock<std::mutex>& lock, Answer& answer,
                    std::chrono::milliseconds patience);
  void take_answer(int fd, std::uint32_t number, std::string text);
  void hang_up(Line line);
  std::shared_ptr<Answer> question(int fd);
  void wake() const;

  const Tell tell_;
  const std::chrono::milliseconds fresh_;
  const Fd events_;
  const Fd bell_;  // wakes the thread
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  Line last_line_ = kOwn;
  std::map<Line, int> lines_;
  std::vector<Question> questions_;  // to this process
  std::vector<std::function<void()>> jobs_;
  std::uint32_t last_number_ = 0;
  std::map<int, SentQuestion> sent_;                      // by socket: the last question
  std::map<std::uint32_t, std::shared_ptr<Answer>> own_;  // to questions of this process to itself
  std::mutex ending_;                                     // guards the end of the thread
  std::thread thread_;
};

}  // namespace dreamcomm
