#include "internode/barrier/monitored_barrier.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "comm/barrier/barrier_flags.h"
#include "comm/rank_state.h"
#include "core/error.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstLook{300};  // for earlier posts
constexpr milliseconds kReadTime{1000};  // for the leaders to read the last verdict

/// How long a leader waits for rank 0's decision beyond its own timeout. Rank 0 first asks the
/// others which ranks are missing and reads their answers. It is no longer than its host's ranks
/// wait for this one.
Clock::duration grace_of(milliseconds timeout) {
  constexpr milliseconds kLeast{300};
  constexpr milliseconds kToDecide{1600};
  return std::min<Clock::duration>(std::max(timeout / 10, kLeast) + kToDecide, barrier::kGrace / 2);
}

std::string key_of(int host) { return concat("barrier/", host); }

}  // namespace

std::vector<std::string> InternodeBarrier::keys(const Topology& topology, int rank) {
  if (rank != 0) return {key_of(0)};
  std::vector<std::string> keys;
  for (int host = 1; host < topology.hosts(); ++host) keys.push_back(key_of(host));
  return keys;
}

InternodeBarrier::InternodeBarrier(Means means, const Topology& topology, int rank, std::string who)
    : means_(std::move(means)), topology_(topology), rank_(rank), who_(std::move(who)) {}

std::string InternodeBarrier::place(int rank) const {
  return concat("rank ", rank, " of ", topology_.words(topology_.host_of(rank)));
}

void InternodeBarrier::look(milliseconds patience) {
  if (patience.count() == 0 && !means_.board->has_news()) return;
  const std::vector<std::string> texts = means_.board->read(patience);
  if (decides()) {
    reports_.clear();
    for (const std::string& text : texts) reports_.push_back(barrier::report_from(text));
  } else {
    read_ = barrier::verdict_from(texts.at(0));
  }
  if (under_way_ && !has_seen_peer() && catch_up()) post();
}

void InternodeBarrier::post() {
  means_.board->post(key_of(topology_.host_of(rank_)),
                     decides() ? barrier::to_text(verdict_) : barrier::to_text(own_));
}

bool InternodeBarrier::is_in(const Report& report) const {
  return report.number == number_ && report.state != State::kNone && report.state != State::kLeft;
}

/// Only valid while this rank is in it.
bool InternodeBarrier::has_left(const Report& report) const {
  return report.state != State::kNone && report.left() > number_;
}

/// True if another rank has been seen in the barrier that this rank is in, with the same number of
/// collectives (otherwise it may have left since): then both are in the same barrier.
bool InternodeBarrier::has_seen_peer() {
  const auto is_here = [this](const Report& report) {
    return is_in(report) && report.issued == terms_.issued;
  };
  const bool seen = decides() ? std::any_of(reports_.begin(), reports_.end(), is_here)
                              : read_.in == number_ + 1 && read_.entered_with == terms_.issued;
  has_seen_peer_ = has_seen_peer_ || seen;
  return has_seen_peer_;
}

/// Advances to the barrier that is next for the others, if this rank left some out: it has issued
/// more collectives than the others had when they left those. Returns whether it did. It may also
/// advance while it is in one, because the others' posts may be read late.
bool InternodeBarrier::catch_up() {
  const std::uint32_t before = number_;
  if (decides()) {
    catch_up_with_leaders();
    verdict_.in = number_ + 1;
  } else {
    catch_up_with_rank_0();
    own_.number = number_;
  }
  return number_ != before;
}

/// INVARIANT: rank 0 ends the barriers that it leaves out, with the collectives of a leader that
/// left them. So other leaders that were in none of them advance to the present one as rank 0 does.
void InternodeBarrier::catch_up_with_leaders() {
  for (const Report& report : reports_) {
    const std::int64_t issued = report.state == State::kLeft ? report.issued : report.before;
    if (!has_left(report) || terms_.issued <= issued) continue;
    for (; number_ < report.left(); ++number_) {
      verdict_.issued[number_ % verdict_.issued.size()] = issued;
    }
    verdict_.ended = number_;
    verdict_.outcome = {barrier::kLate, "rank 0 was not in it"};
  }
}

void InternodeBarrier::catch_up_with_rank_0() {
  const std::size_t kept = read_.issued.size();
  const auto left_out = [&] {
    const bool known = read_.ended - number_ <= kept;
    return !known || terms_.issued > read_.issued[number_ % kept];
  };
  // No rank has left out a barrier that passed.
  while (read_.ended > number_ && read_.passed <= number_ && left_out()) ++number_;
}

/// How the barrier ended that this leader enters late, as a text for all of its host.
BarrierOutcome InternodeBarrier::late() const {
  const bool own = read_.ended == number_ + 1;
  const std::uint32_t bits = own && read_.outcome.bits != 0 ? read_.outcome.bits : barrier::kLate;
  return {bits | barrier::kMissed,
          concat("monitored_barrier on ", topology_.words(topology_.host_of(rank_)),
                 " came too late: rank 0 has ended it without this host",
                 own ? concat(": ", read_.outcome.problem) : "")};
}

std::optional<BarrierOutcome> InternodeBarrier::enter(const Terms& terms) {
  const std::scoped_lock lock(mutex_);
  terms_ = terms;
  deciding_.reset();
  outcome_ = {};
  look(kFirstLook);
  const std::int64_t before = own_.state == State::kLeft ? own_.issued : -1;
  own_ = Report();
  own_.issued = terms.issued;
  own_.before = before;
  verdict_.asks = 0;
  verdict_.entered_with = terms.issued;
  catch_up();
  if (!decides() && read_.ended > number_) return late();
  too_late_ = std::any_of(reports_.begin(), reports_.end(),
                          [this](const Report& report) { return has_left(report); });
  own_.state = State::kIn;
  under_way_ = true;
  has_seen_peer_ = false;
  post();
  return std::nullopt;
}

bool InternodeBarrier::is_over() {
  const std::scoped_lock lock(mutex_);
  look();
  look_for_lost();
  if (!gone_.empty()) return true;
  if (!decides()) return read_.ended > number_ || read_.asks == number_ + 1;
  return std::any_of(reports_.begin(), reports_.end(), [this](const Report& report) {
    const bool lacks = report.has_count() && !report.count.is_complete();
    return has_left(report) || (is_in(report) && (lacks || report.state == State::kOver));
  });
}

void InternodeBarrier::report(const BarrierCount& count) {
  const std::scoped_lock lock(mutex_);
  own_.count = count;
  own_.state = State::kCounted;
  if (!decides()) post();
}

std::optional<BarrierOutcome> InternodeBarrier::outcome(int over) {
  const std::scoped_lock lock(mutex_);
  look();
  look_for_lost();
  return decides() ? decide(over) : apply_verdict(over);
}

/// Applies rank 0's verdict; for the other leaders. Once rank 0 is in it, it decides within every
/// deadline.
std::optional<BarrierOutcome> InternodeBarrier::apply_verdict(int over) {
  if (read_.passed == number_ + 1) return BarrierOutcome{};
  if (read_.ended == number_ + 1) return read_.outcome;
  const std::string who = concat("monitored_barrier on ", who_);
  if (read_.ended > number_) {
    return BarrierOutcome{
        barrier::kLate,
        concat(who, " was ended by rank 0, and others since, before ", "this rank could read why")};
  }
  if (const auto gone = gone_.find(0); gone != gone_.end()) {
    return BarrierOutcome{barrier::kEnded, gone->second};
  }
  if (over < 0) return std::nullopt;
  if (!deciding_) {
    deciding_ = Clock::now();
    own_.state = State::kOver;
    own_.over = over;
    post();
  }
  const bool there = read_.in == number_ + 1;
  // It ends before the ranks of this host stop waiting.
  const Clock::duration grace = there ? grace_of(terms_.timeout) : kFirstLook;
  if (Clock::now() < *deciding_ + grace) return std::nullopt;
  const char* const does =
      there ? ", which has been in it, to decide; nothing arrives from it now" : " to enter it";
  return BarrierOutcome{barrier::kLate, concat(who, " reached its timeout after ",
                                               in_seconds(Clock::now() - terms_.begin),
                                               " of waiting for ", place(0), does)};
}

void InternodeBarrier::leave(const std::string& interrupted) {
  const std::scoped_lock lock(mutex_);
  under_way_ = false;
  if (decides()) {
    if (!interrupted.empty()) outcome_ = {barrier::kEnded, interrupted};
    verdict_.outcome = outcome_;
    verdict_.ended = number_ + 1;
    if (outcome_.bits == 0) verdict_.passed = number_ + 1;
    verdict_.in = verdict_.asks = 0;
    verdict_.issued[number_ % verdict_.issued.size()] = terms_.issued;
  } else {
    own_.state = State::kLeft;
    own_.issued = terms_.issued;
    own_.count = {.problem = interrupted};
  }
  post();
  ++number_;
}

void InternodeBarrier::wait_for_readers() {
  if (!decides()) return;
  const Clock::time_point end = Clock::now() + kReadTime;
  std::vector<int> awaited;  // indexes of the leaders that were in the last one
  std::unique_lock lock(mutex_);
  for (std::size_t i = 0; i < reports_.size(); ++i) {
    const Report& report = reports_[i];
    const bool was_in = report.state != State::kNone && report.number + 1 == number_;
    if (was_in) awaited.push_back(static_cast<int>(i));
  }
  const auto have_read = [&] {
    return std::all_of(awaited.begin(), awaited.end(), [this](int i) {
      return reports_[static_cast<std::size_t>(i)].left() >= number_;
    });
  };
  while (!have_read() && Clock::now() < end) {
    lock.unlock();
    std::this_thread::sleep_for(milliseconds(2));
    lock.lock();
    look();
  }
}

}  // namespace dreamcomm
