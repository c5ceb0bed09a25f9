// The jobs of a group that run on its own thread, and that thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "comm/p2p/tag_matching.h"
#include "comm/rank_state.h"
#include "comm/ticket_lock.h"

namespace dreamcomm {

/// Runs submitted jobs, each in its turn, and moves messages that no thread waits for. The thread
/// starts when it is first needed.
class ProgressThread {
 public:
  using Job = std::function<void()>;

  ProgressThread(RankState& state, TicketLock& ticket_lock, TagMatcher& matcher,
                 const std::function<void()>& message_check);

  /// `owner` keeps everything named in the constructor alive for the thread.
  /// After stop() the job is dropped.
  void submit(Job job, const std::shared_ptr<void>& owner);
  /// Takes over a turn whose caller no longer waits for it.
  void skip(TicketLock::Turn turn, const std::shared_ptr<void>& owner);
  void start(const std::shared_ptr<void>& owner);
  /// Returns when all jobs have run and the thread has ended.
  void stop();

 private:
  void start_locked(const std::shared_ptr<void>& owner);
  void work();
  bool run_next();
  bool has_turn();
  bool is_finished();

  RankState& state_;
  TicketLock& ticket_lock_;
  TagMatcher& matcher_;
  const std::function<void()>& message_check_;
  std::mutex mutex_;
  std::deque<std::pair<TicketLock::Turn, Job>> jobs_;  // turns ascend, except skipped ones
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace dreamcomm
