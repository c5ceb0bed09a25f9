#include "comm/rank_state.h"

#include <algorithm>
#include <chrono>
#include <iomanip>
#include <sstream>
#include <utility>

#include "core/text.h"

namespace dreamcomm {

using std::chrono::milliseconds;

namespace {

/// " (ranks 2, 3 of the job)", or nothing where they have the same numbers there.
std::string describe_job(const std::vector<int>& world_ranks) {
  constexpr std::size_t kNamed = 16;
  std::string text;
  bool same = true;
  for (std::size_t i = 0; i < world_ranks.size(); ++i) {
    same = same && world_ranks[i] == static_cast<int>(i);
    if (i < kNamed) text += concat(i == 0 ? "" : ", ", world_ranks[i]);
  }
  if (same) return "";
  return concat(" (ranks ", text, world_ranks.size() > kNamed ? ", ..." : "", " of the job)");
}

}  // namespace

std::string describe_group(const std::string& name, const std::vector<int>& world_ranks) {
  return concat("group '", name, "'", describe_job(world_ranks));
}

std::string in_seconds(Clock::duration time) {
  constexpr double kShort = 0.1;
  const double seconds = std::chrono::duration<double>(time).count();
  std::ostringstream text;
  text << std::fixed;
  if (seconds < kShort) {
    text << std::setprecision(0) << seconds * 1e3 << " ms";
  } else {
    text << std::setprecision(1) << seconds << " s";
  }
  return text.str();
}

RankState::RankState(Fabric& fabric, std::string group, Warn warn,
                     const std::vector<int>& world_ranks)
    : fabric_(fabric),
      patience_(Patience::of(fabric.size(), fabric.internode())),
      group_(std::move(group)),
      in_job_(describe_job(world_ranks)),
      warn_(std::move(warn)) {
  put_text(header().identity.group, group_);
  header().named.publish(1);
}

std::string RankState::who() const {
  return concat("rank ", fabric_.number(rank()), " of ", fabric_.size_of_group(), " in ",
                this->group());
}

void RankState::fail(ErrorKind kind, const std::string& reason) {
  {
    std::scoped_lock lock(mutex_);
    if (failed()) return;
    reason_ = reason;
    kind_ = kind;
    // It is set before peers can know: this rank's waits would take the peers' reactions for the
    // cause.
    failed_.publish(1);
    // The text is written first: peers read it after they have seen the status.
    put_text(header().reason, reason);
    header().status.publish(static_cast<std::uint32_t>(Status::kFailed));
  }
  ring_peers();
  ring_own();
}

std::optional<std::string> RankState::failure() const {
  if (!failed()) return std::nullopt;
  std::scoped_lock lock(mutex_);
  return reason_;
}

std::optional<ErrorKind> RankState::failure_kind() const {
  std::scoped_lock lock(mutex_);
  return kind_;
}

void RankState::check_usable(const char* operation) const {
  if (!failed()) [[likely]]
    return;
  throw Error(ErrorKind::kAborted,
              concat(operation, " on ", who(), ": the group is unusable since: ", *failure(),
                     ". Destroy the group and create a new one"));
}

void RankState::leave() {
  {
    std::scoped_lock lock(mutex_);
    if (failed()) return;
    reason_ = "this rank has left it (shutdown)";
    failed_.publish(1);
    header().status.publish(static_cast<std::uint32_t>(Status::kLeft));
  }
  ring_peers();
  ring_own();
}

void RankState::ring_peers() const {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) fabric_.header(peer).doorbell.ring();
  }
}

void RankState::ring_own() {
  bell_.ring();
  header().doorbell.ring();
}

/// In a multi-node group, calls of the program are those of the whole group.
RankView RankState::view_of(int peer) const {
  const Header& header = fabric_.header(peer);
  return fabric_.internode() ? whole_view_of(header) : dreamcomm::view_of(header);
}

std::string RankState::last_act(int peer) const { return dreamcomm::last_act(view_of(peer)); }

Clock::time_point RankState::answer_until(Clock::duration waited) {
  constexpr Clock::duration kLeast = milliseconds(20);
  constexpr Clock::duration kMost = milliseconds(1000);
  return Clock::now() + std::clamp(waited / 12, kLeast, kMost);
}

namespace {

/// Describes the oldest message, "; its recv from rank 0 has waited 3.1 s": it may be what this
/// rank waits for.
std::string describe_oldest(const RankView& seen) {
  if (seen.messages == 0 || is_busy(seen)) return "";
  const RankView::Message& oldest = seen.oldest;
  const bool sends = oldest.kind == Kind::kSend;
  const std::string peer = oldest.peer < 0 ? "any rank" : concat("rank ", oldest.peer);
  return concat("; its ", sends ? "send to " : "recv from ", peer, " has waited ",
                in_seconds(std::chrono::nanoseconds(now_ns() - oldest.since_ns)));
}

}  // namespace

std::string RankState::does(int peer, Clock::time_point until) const {
  const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
  const RankView seen = view_of(peer);  // once, or the two parts may disagree
  return dreamcomm::last_act(seen) + describe_oldest(seen) +
         fabric_.other_activity(peer, is_busy(seen), std::max(left, milliseconds(0)));
}

}  // namespace dreamcomm
