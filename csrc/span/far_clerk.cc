// The deadlines of messages between hosts.
#include <algorithm>

#include "core/signals.h"
#include "span/far_mailbox.h"

namespace dreamcomm {

/// Wakes the clerk in time.
void FarMailbox::watch(Clock::time_point deadline) {
  if (deadline >= watched_) return;
  watched_ = deadline;
  if (!clerk_.joinable()) clerk_ = std::thread([this] { work(); });
  changed_.notify_all();
}

Clock::time_point FarMailbox::next_deadline() const {
  Clock::time_point next = Clock::time_point::max();
  for (const MessagePtr& m : wanted_) {
    if (m->rank) next = std::min(next, m->deadline);
  }
  for (const MessagePtr& m : under_way_) next = std::min(next, m->deadline);
  return next;
}

void FarMailbox::work() {
  block_signals();
  Lock lock(mutex_);
  while (!ending_) {
    watched_ = next_deadline();
    if (watched_ == Clock::time_point::max()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, watched_);
    }
    const std::optional<std::string> broken = expire(Clock::now());
    settle(lock);
    if (broken) options_.broken(*broken);
    lock.lock();
  }
}

/// A receive that nothing has matched is simply withdrawn. What the peer knows of cannot be: then
/// the group is unusable, and why is returned.
std::optional<std::string> FarMailbox::expire(Clock::time_point now) {
  const auto is_late = [&](const Message& m) { return now >= m.deadline; };
  const std::vector<MessagePtr> wanted(wanted_.begin(), wanted_.end());
  for (const MessagePtr& m : wanted) {
    if (!m->rank || !is_late(*m)) continue;  // this host's mailbox looks after those of any source
    drop(m, ErrorKind::kTimeout,
         concat(" reached its timeout: rank ", *m->rank, " has not sent it"));
  }
  const auto late = std::find_if(under_way_.begin(), under_way_.end(),
                                 [&](const MessagePtr& m) { return is_late(*m); });
  if (late == under_way_.end()) return std::nullopt;
  const MessagePtr message = *late;
  const bool waits =
      message->kind == Kind::kSend && (message->parcel || message->cargo.bytes <= Letter::kInline);
  const char* const lacks = waits ? "received" : "finished moving";
  const std::string why =
      concat(" reached its timeout: rank ", *message->rank, " has not ", lacks, " it");
  const std::string reason = concat(words(*message), why);
  drop(message, ErrorKind::kTimeout, why);
  drop_all(ErrorKind::kTimeout, reason);
  return reason;
}

}  // namespace dreamcomm
