// Where the program of a process is, told to peers that ask: for what is said of a late rank.
//
// The connection of two ranks, which stays open to tell of a death, carries letters: a question,
// and its answer. One thread of the process reads those of all its groups, and sleeps meanwhile.
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
  /// Says where the program is, as " at FILE:LINE in FUNCTION", or "". Called on the thread of
  /// the object; may wait for the interpreter. Must not throw.
  using Tell = std::function<std::string()>;

  /// What is returned stops it when its last copy is dropped, on whatever thread: `tell` may run
  /// the garbage collector, and that drop the last group. An answer that was asked for ahead
  /// will do for ask() so long after the question. Throws Error(kSystem).
  static std::shared_ptr<CallSiteService> make(Tell tell, std::chrono::milliseconds fresh = kFresh);
  CallSiteService(const CallSiteService&) = delete;
  CallSiteService& operator=(const CallSiteService&) = delete;

  /// Ends the thread: from then on nothing is answered or learned. Waits for a `tell` that is
  /// under way, so what that needs (the GIL) must not be held. Idempotent, any thread.
  void stop();

  /// What comes through the socket is answered until the result is dropped, which has to be
  /// before the socket is closed. Nothing is answered if the system refuses to watch it.
  std::shared_ptr<void> listen(const Fd& socket);
  /// What the process at the other end of a socket that is listened to says, or "" if it does
  /// not within `patience`: it is stopped, or its interpreter is busy. Whoever has not answered
  /// one question is not waited for again until it does, or some time has passed. Several may
  /// wait for one answer. Any thread.
  std::string ask(const Fd& socket, std::chrono::milliseconds patience);
  /// Puts the question of the next ask() there. Any thread.
  void inquire(const Fd& socket);
  /// What this process says itself: for threads that run no Python.
  std::string own(std::chrono::milliseconds patience);
  /// Has the thread do something else that needs what `tell` may wait for. Must not throw. It is
  /// done unless the thread has ended.
  void post(std::function<void()> job);

 private:
  enum class Sort : std::uint32_t { kQuestion = 1, kAnswer = 2 };
  struct Query {
    Sort sort = Sort::kQuestion;
    std::uint32_t number = 0;  // of the question, by who asks
    std::array<char, 504> text{};
  };
  using Line = std::uint64_t;  // a socket; never used twice, as descriptors are
  static constexpr Line kOwn = 0;
  using Time = std::chrono::steady_clock::time_point;
  struct Answer {
    Time asked;
    std::optional<std::string> text{};
    bool in_vain = false;  // somebody has waited for it too long
    bool told = false;     // somebody was told of it: who asks later asks anew
  };
  struct Asked {
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
  std::map<int, Asked> asked_;                            // by socket: the last question
  std::map<std::uint32_t, std::shared_ptr<Answer>> own_;  // to questions of this process to itself
  std::mutex ending_;                                     // of the thread
  std::thread thread_;
};

}  // namespace dreamcomm
