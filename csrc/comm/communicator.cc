#include "comm/communicator.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>
#include <vector>

#include "algorithms/algorithms.h"
#include "algorithms/cost/explain.h"
#include "algorithms/table.h"
#include "comm/barrier/monitored_barrier.h"
#include "comm/call_scopes.h"
#include "comm/p2p/completion.h"
#include "comm/p2p/tag_matching.h"
#include "comm/progress_thread.h"
#include "comm/rank_state.h"
#include "comm/record/recorder.h"
#include "comm/ticket_lock.h"
#include "comm/tuning/agree_costs.h"
#include "comm/tuning/algorithm_cache.h"
#include "comm/validate.h"
#include "comm/wait_watchdog.h"
#include "core/counts.h"
#include "transport/fabric.h"
#include "transport/introspect/window_reader.h"
#include "transport/rounds.h"

namespace dreamcomm {
namespace {

/// A group for quick calls may still take this long to agree on costs.
constexpr std::chrono::milliseconds kLeastTuning{10'000};

/// Equal on all ranks: each rank's rank_info at set-up said whether it has one.
bool each_has_heap(const Fabric& fabric) {
  for (int rank = 0; rank < fabric.size(); ++rank) {
    if (fabric.heap(rank).empty()) return false;
  }
  return true;
}

/// The byte that peers compare: a rank that asks for heaps makes another turn.
std::uint8_t row_byte(const Request& request, const Choice& choice) {
  if (request.pass != nullptr) return Signature::kSharded;
  return static_cast<std::uint8_t>(choice.row | (choice.asks ? Signature::kAsks : 0U));
}

/// This rank's Opening::own.
std::uint64_t own_of(const Reduction& how) {
  return how.counts != nullptr ? how.counts->own().bits()
                               : std::bit_cast<std::uint64_t>(how.factor);
}

Recorder::Origin origin_of(Fabric& fabric, const CommOptions& options) {
  return {.team = view_of(fabric.header(fabric.rank())).team,
          .group = options.group,
          .rank = fabric.rank(),
          .size = fabric.size(),
          .world_ranks = options.world_ranks};
}

/// A line of explain() if other programs use the processors, too; else nothing.
std::string describe_waits(const Patience& patience) {
  if (patience.long_yields() == 0) return "";
  return concat("\n  (others use the processors, too: ", patience.long_yields(),
                " times a wait of this rank that offered its processor got it back a millisecond ",
                "or more later; ",
                patience.avoids_yields() ? "waits sleep at once now, and seldom try it again)"
                                         : "not of late: waits offer it again)");
}

std::uint64_t to_count(const Gauge& gauge) { return static_cast<std::uint64_t>(gauge.read()); }

}  // namespace

struct Communicator::Impl {
  Impl(std::unique_ptr<Fabric> f, CommOptions o)
      : fabric(std::move(f)),
        options(std::move(o)),
        state(*fabric, options.group, options.warn,
              fabric->internode() ? options.world_ranks_of_whole : options.world_ranks),
        recorder(std::make_shared<Recorder>(origin_of(*fabric, options))),
        rounds(*fabric),
        matcher(state, *recorder),
        monitored_barrier(state),
        scratch(fabric->size()),
        cache(options.algorithm, options.fixed_order, each_has_heap(*fabric)),
        message_check([this] { check_messages(); }),
        thread(state, ticket_lock, matcher, message_check) {
    scratch.call_site = options.call_site;
    if (options.group != kDefaultGroup) scratch.group = state.group();
  }

  /// Checks the messages under way. Runs while a thread waits for something else.
  void check_messages() {
    if (!matcher.busy()) return;
    if (state.failed()) {
      matcher.fail_all(ErrorKind::kAborted, *state.failure());
      return;
    }
    const auto broken = matcher.check_health();
    if (fabric->internode()) notify_remote_messages();
    if (!broken) return;
    state.fail(ErrorKind::kTimeout, *broken);
    matcher.fail_all(ErrorKind::kTimeout, *broken);
  }

  void notify_remote_messages() {
    const std::optional<std::string> why = matcher.why_alone();
    if (!why) return;
    const std::scoped_lock lock(remote_mutex);
    if (remote.alone) remote.alone(*why);
  }

  Clock::time_point deadline_of(Clock::time_point given, Clock::time_point now) const {
    return given == Clock::time_point::max() ? deadline_in(now, options.timeout) : given;
  }

  template <typename Job>
  void in_turn(const std::shared_ptr<Impl>& self, const Request* request,
               const Interrupt& interrupt, Job&& job) {
    const TicketLock::Turn turn = ticket_lock.take();
    if (!ticket_lock.is_up(turn)) wait_for_turn(self, turn, request, interrupt);
    const TurnScope passing(ticket_lock, turn, state);
    job();
  }

  void wait_for_turn(const std::shared_ptr<Impl>& self, TicketLock::Turn turn,
                     const Request* request, const Interrupt& interrupt) {
    const std::function<std::string()> what = [request] {
      return concat(request == nullptr ? "a call" : dreamcomm::describe(*request),
                    ", which waits for the calls before it,");
    };
    WaitWatchdog watchdog(state, what, Clock::time_point::max(), message_check, interrupt);
    try {
      wait_until(
          state.bell(), between_calls, watchdog, [&] { return ticket_lock.is_up(turn); },
          [] { return -1; });
    } catch (...) {
      thread.skip(turn, self);  // the calls behind this one must get theirs
      throw;
    }
  }

  /// A peer that has aborted the group may have published its part of this call
  /// before; without this look the call could succeed here and not there.
  /// INVARIANT of calls in heaps: what a rank has read of a peer's tensor is what the
  /// peer called with. A peer publishes its failure before its caller can write there
  /// again, so a rank that sees no failure after its last read has read before that.
  void check_peers(const Request& request, const char* cannot) const {
    for (int peer = 0; peer < fabric->size(); ++peer) {
      const auto status = static_cast<Status>(fabric->header(peer).status.read());
      if (status != Status::kFailed || peer == fabric->rank()) [[likely]]
        continue;
      throw Error(ErrorKind::kPeerLost, concat(dreamcomm::describe(request), " on ", state.who(),
                                               cannot, why_gone(*fabric, peer)));
    }
  }

  /// In the call's turn: no other thread changes the counts meanwhile.
  void run_now(const Request& request, const Interrupt& interrupt) {
    state.check_usable(name(request.kind).data());
    if (request.reduction.counts != nullptr) request.reduction.counts->require();
    const std::function<std::string()> what = [&request] { return dreamcomm::describe(request); };
    const Clock::time_point now =
        scratch.clock.now();  // read once: a small call takes about a microsecond
    WaitWatchdog watchdog(state, what, deadline_of(request.deadline, now), message_check, interrupt,
                          now, request.excuse);
    CallShape call = call_of(request);
    Choice choice = request.pass == nullptr ? cache.choose(call) : Choice{.row = Record::kSharded};
    sequence.grow(1);
    const std::int64_t number = sequence.read();
    const InCallScope entered(state.header().progress, request.kind, call.bytes, number, now);
    const Opening opening{
        signature_of(request, static_cast<std::uint64_t>(number), row_byte(request, choice)),
        own_of(request.reduction), place_of(request.in), place_of(request.out)};
    const Preference heaps = cache.preference();
    Entry entry(*recorder, scratch.clock,
                [&] { return record_of(request, number, call.bytes, to_ns(now)); });
    scratch.timeline = entry.timeline();
    scratch.refusal = request.refusal;
    Primitives prims(rounds, opening, watchdog, scratch, cache.heaps() ? &heaps : nullptr,
                     to_ns(now), request.reduction.counts);
    try {
      check_peers(request, " cannot begin: ");
      if (choice.asks) choice = cache.choose(ask_for_heaps(call, prims, request));
      if (request.pass == nullptr) {
        algorithm_table()[choice.row].run(prims, request);
      } else {
        algorithms::sharded_pass(prims, request);
      }
      if (prims.was_in_place()) check_peers(request, " cannot be trusted: ");
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kMismatch) state.fail(error.kind(), error.what());
      throw;
    } catch (...) {
      state.fail(ErrorKind::kInterrupted,
                 concat(dreamcomm::describe(request), " was interrupted on ", state.who()));
      throw;
    }
    Tally& counter = state.header().tallies[static_cast<std::size_t>(request.kind)];
    counter.calls.grow(1);
    counter.sent.grow(static_cast<std::int64_t>(prims.sent()));
    counter.received.grow(static_cast<std::int64_t>(prims.received()));
    if (prims.was_in_place()) counter.in_place.grow(1);
    if (!entry.wanted()) [[likely]]
      return;
    Record& record = entry.record();
    record.arrived_ns = prims.arrival().last_ns();
    record.peer = prims.arrival().last_rank();
    record.row = static_cast<std::uint8_t>(choice.row);
    record.in_place = prims.was_in_place();
    last_to_come = {record.arrived_ns, record.peer};
    entry.done();
  }

  /// Asks all ranks whose tensors lie in heaps: the same answer on every rank.
  static CallShape ask_for_heaps(CallShape call, Primitives& prims, const Request& request) {
    prims.open();
    const bool from_root = request.kind == Kind::kBroadcast;
    const bool to_root = request.kind == Kind::kReduce;
    call.in_heap = from_root ? prims.in(request.root) != nullptr : prims.all_in();
    call.out_heap = to_root ? prims.out(request.root) != nullptr : prims.all_out();
    return call;
  }

  /// Where the blocks lie in this rank's heap, from 1 on; 0 if they are not there
  /// or do not follow each other.
  std::uint64_t place_of(std::span<const Block> blocks) const {
    const std::span<std::byte> heap = fabric->heap(fabric->rank());
    if (blocks.empty() || blocks[0].data < heap.data()) return 0;
    const std::byte* end = blocks[0].data;
    for (const Block& block : blocks) {
      if (block.data != end) return 0;
      end += block.bytes;
    }
    if (end > heap.data() + heap.size()) return 0;
    return static_cast<std::uint64_t>(blocks[0].data - heap.data()) + 1;
  }

  CallShape call_of(const Request& request) const {
    CallShape call{request.kind, request.reduction.op, block_bytes(request), fabric->size(),
                   room()};
    call.along_tree = request.reduction.along_tree;
    return call;
  }
  std::size_t room() const { return rounds.page_bytes() - Primitives::kSignature; }

  void check_peer(const char* operation, int peer) const {
    check(peer >= 0 && peer < fabric->size() && peer != fabric->rank(), ErrorKind::kInvalid,
          operation, " on ", state.who(), ": the other rank is ", peer,
          ", but must be one from 0 to ", fabric->size() - 1, " and not this rank");
  }

  std::shared_ptr<Completion> under_way(const std::shared_ptr<Impl>& self,
                                        std::shared_ptr<Completion> completion) {
    if (!completion->done()) thread.start(self);
    return completion;
  }

  std::unique_ptr<Fabric> fabric;
  const CommOptions options;
  RankState state;
  const std::shared_ptr<Recorder> recorder;
  Rounds rounds;
  TagMatcher matcher;
  std::mutex remote_mutex;
  RemoteMessages remote;
  MonitoredBarrier monitored_barrier;
  TicketLock ticket_lock;
  Primitives::Scratch scratch;
  AlgorithmCache cache;
  Gauge sequence;
  Patience between_calls{0, 2};  // of waits for this rank's own calls before
  LastToCome last_to_come;       // to the last call that was recorded
  const std::function<void()> message_check;
  ProgressThread thread;
};

Communicator::Communicator(std::unique_ptr<Fabric> fabric, CommOptions options)
    : impl_(std::make_shared<Impl>(std::move(fabric), std::move(options))) {
  const std::string& wanted = impl_->options.algorithm;
  const auto table = algorithm_table();
  const bool known =
      std::any_of(table.begin(), table.end(), [&](const Row& row) { return row.name == wanted; });
  check(wanted == "auto" || known, ErrorKind::kInvalid, "algorithm is '", wanted,
        "', but must be auto, direct, one_shot, ring, master or heap");
}

Communicator::~Communicator() { shutdown(); }

int Communicator::rank() const { return impl_->fabric->rank(); }
int Communicator::size() const { return impl_->fabric->size(); }

void Communicator::run(const Request& request, const Interrupt& interrupt) {
  validate(request, rank(), size());
  impl_->in_turn(impl_, &request, interrupt, [&] { impl_->run_now(request, interrupt); });
}

void Communicator::run_in_turn(const std::function<void()>& job, const Interrupt& interrupt) {
  impl_->in_turn(impl_, nullptr, interrupt, job);
}

void Communicator::run_ordered(const Request& request, const Interrupt& interrupt) {
  validate(request, rank(), size());
  impl_->run_now(request, interrupt);
}

void Communicator::run_part(const Request& part, const Interrupt& interrupt) {
  impl_->run_now(part, interrupt);
}

void Communicator::submit(std::function<void()> job) {
  impl_->thread.submit(std::move(job), impl_);
}

std::shared_ptr<Completion> Communicator::send(const Cargo& cargo, int peer, std::uint64_t tag,
                                               Clock::time_point deadline) {
  return send(Block{cargo.data(), cargo.bytes}, peer, tag, deadline);
}

std::shared_ptr<Completion> Communicator::receive(const Cargo& cargo, std::optional<int> peer,
                                                  std::uint64_t tag, Clock::time_point deadline) {
  return receive(Block{cargo.data(), cargo.bytes}, peer, tag, deadline);
}

std::shared_ptr<Completion> Communicator::send(Block data, int peer, std::uint64_t tag,
                                               Clock::time_point deadline) {
  impl_->check_peer("send", peer);
  impl_->state.check_usable("send");
  return impl_->under_way(
      impl_, impl_->matcher.send(data, peer, tag, impl_->deadline_of(deadline, Clock::now())));
}

std::shared_ptr<Completion> Communicator::receive(Block data, std::optional<int> peer,
                                                  std::uint64_t tag, Clock::time_point deadline) {
  if (peer) impl_->check_peer("recv", *peer);
  impl_->state.check_usable("recv");
  return impl_->under_way(
      impl_, impl_->matcher.receive(data, peer, tag, impl_->deadline_of(deadline, Clock::now())));
}

void Communicator::withdraw(const Completion& completion) { impl_->matcher.withdraw(completion); }
void Communicator::cancel(const Completion& completion) { impl_->matcher.cancel(completion); }
void Communicator::ring() { impl_->state.ring_own(); }

void Communicator::wait(Completion& completion, const Interrupt& interrupt) {
  const std::function<std::string()> what = [] { return std::string("a message"); };
  WaitWatchdog watchdog(impl_->state, what, Clock::time_point::max(), impl_->message_check,
                        interrupt);
  try {
    wait_until(
        impl_->state.header().doorbell, impl_->state.patience(), watchdog,
        [&] {
          if (completion.done()) return true;
          impl_->matcher.progress();
          return completion.done();
        },
        [] { return -1; });
  } catch (const Error&) {
    impl_->message_check();  // completes the message if its own error is this one
    if (!completion.done()) throw;
  }
  if (completion.failure()) std::rethrow_exception(completion.failure());
}

void Communicator::wait_through(const std::function<bool()>& wait,
                                const std::function<std::string()>& what, const LongWait& terms,
                                const Interrupt& interrupt) {
  RankState& state = impl_->state;
  WaitWatchdog watchdog(state, what, terms.deadline, impl_->message_check, interrupt, Clock::now(),
                        {}, terms.grace);
  watchdog.warn_without_rank(terms.warned);
  const InternodeWaitScope away(state.header().progress);
  const auto amiss = [&] {
    int stopped = -1;
    for (int peer = 0; peer < size(); ++peer) {
      const auto status = static_cast<Status>(impl_->fabric->header(peer).status.read());
      if (peer == rank() || status == Status::kLeft) continue;  // no call waits for it
      if (!why_gone(*impl_->fabric, peer).empty()) return peer;
      if (impl_->fabric->has_stopped(peer)) stopped = peer;  // the other nodes may wait for it
    }
    return stopped;
  };
  while (!wait()) watchdog.look(amiss());
}

void Communicator::monitored_barrier(std::chrono::milliseconds timeout, bool all,
                                     const Interrupt& interrupt, std::int64_t issued,
                                     RemoteBarrier* remote) {
  impl_->monitored_barrier.hold({timeout, all, issued, remote}, impl_->message_check, interrupt);
}

void Communicator::monitored_barrier(std::chrono::milliseconds timeout, bool all,
                                     const Interrupt& interrupt, std::int64_t issued) {
  monitored_barrier(timeout, all, interrupt, issued, nullptr);
}

void Communicator::monitored_barrier(std::chrono::milliseconds timeout, bool all,
                                     const Interrupt& interrupt) {
  monitored_barrier(timeout, all, interrupt, impl_->sequence.read());
}

void Communicator::abort(const std::string& reason) {
  impl_->state.fail(ErrorKind::kAborted, concat(reason, " (", impl_->state.who(), ')'));
  impl_->matcher.fail_all(ErrorKind::kAborted, reason);
}

void Communicator::shutdown() {
  impl_->thread.stop();
  impl_->matcher.fail_all(ErrorKind::kAborted, "the group was shut down");
  impl_->state.leave();
}

void Communicator::check_usable(const char* operation) const {
  impl_->state.check_usable(operation);
}
std::string Communicator::who() const { return impl_->state.who(); }

void Communicator::warn(const std::string& text) const { impl_->state.warn(text); }

std::optional<std::string> Communicator::failure() const { return impl_->state.failure(); }

std::optional<ErrorKind> Communicator::failure_kind() const { return impl_->state.failure_kind(); }

bool Communicator::has_ended(int rank) const {
  const bool left = impl_->state.failed() && !impl_->state.failure_kind();
  if (rank < 0 || rank >= size() || left) return false;
  // By the same signs as the errors that name it: who has raised one tells other hosts of the end.
  return impl_->fabric->has_ended(rank) || has_died(*impl_->fabric, rank);
}

std::string Communicator::lost() const { return describe_lost(impl_->state); }

std::string Communicator::lost(int rank) const { return describe_end(impl_->state, rank); }

std::string Communicator::does(int rank) const {
  return impl_->state.does(rank, RankState::answer_until(std::chrono::seconds(12)));
}

bool Communicator::all_have_come() const {
  const std::int64_t call = impl_->state.header().progress.sequence.read();
  for (int peer = 0; peer < size(); ++peer) {
    if (impl_->fabric->header(peer).progress.sequence.read() < call) return false;
  }
  return true;
}

std::string Communicator::awaited(Clock::duration waited) const {
  const Header& header = impl_->state.header();
  const Progress& remote = header.whole.calls;
  const std::int64_t far = remote.inside.read() != 0 ? remote.waiting_for.read() : -1;
  if (impl_->fabric->internode() && far >= 0) return concat("rank ", far, " of another host");
  const auto peer = static_cast<int>(header.progress.waiting_for.read());
  const bool waits = header.progress.inside.read() != 0;
  if (!waits || peer < 0 || peer >= size() || peer == rank()) return "";
  return concat("rank ", impl_->fabric->number(peer), ", which ",
                impl_->state.does(peer, RankState::answer_until(waited)));
}

std::string Communicator::awaited(const Completion& completion, Clock::duration waited) const {
  const std::string near = impl_->matcher.lacks(completion, RankState::answer_until(waited));
  const std::scoped_lock lock(impl_->remote_mutex);
  return near.empty() && impl_->remote.lacks ? impl_->remote.lacks(completion) : near;
}

void Communicator::set_remote_messages(RemoteMessages messages) {
  const std::scoped_lock lock(impl_->remote_mutex);
  impl_->remote = std::move(messages);
}

std::uint64_t Communicator::sequence() const { return to_count(impl_->sequence); }

std::array<Traffic, kKinds> Communicator::traffic() const {
  std::array<Traffic, kKinds> result;
  for (std::size_t i = 0; i < result.size(); ++i) {
    const Tally& counter = impl_->state.header().tallies[i];
    result[i] = {to_count(counter.calls), to_count(counter.sent), to_count(counter.received),
                 to_count(counter.in_place)};
  }
  return result;
}

void Communicator::reset_traffic() {
  for (Tally& counter : impl_->state.header().tallies) {
    for (Gauge* gauge : {&counter.calls, &counter.sent, &counter.received, &counter.in_place}) {
      gauge->set(0);
    }
  }
}

std::string Communicator::explain(Kind kind, std::size_t bytes, bool in_heaps) const {
  CallShape call{kind, ReduceOp::kSum, bytes, size(), impl_->room()};
  call.in_heap = call.out_heap = in_heaps && impl_->cache.heaps();
  const AdaptiveCopy& writer = impl_->scratch.writer;
  return concat(
      dreamcomm::explain(call, impl_->cache.preference(), describe(), impl_->cache.heaps()),
      "\n  (of this rank's ", writer.writes(), " larger writes of pages, ", writer.streamed(),
      " went past the caches: where that was faster, or to try it)",
      describe_waits(impl_->rounds.patience()));
}

Prediction Communicator::predict(Kind kind, std::size_t bytes, bool in_heaps) const {
  CallShape call{kind, ReduceOp::kSum, bytes, size(), impl_->room()};
  call.in_heap = call.out_heap = in_heaps && impl_->cache.heaps();
  const std::size_t picked = pick(call, impl_->cache.preference());
  check(picked < algorithm_table().size(), ErrorKind::kInvalid, "no time is predicted for ",
        name(kind), ": messages have one algorithm");
  const Row& row = algorithm_table()[picked];
  return {std::string(row.name), dreamcomm::predict(row, call, impl_->cache.costs())};
}

const Costs& Communicator::costs() const { return impl_->cache.costs(); }

bool Communicator::tune(const std::optional<Costs>& known, Heap* heap, const Interrupt& interrupt,
                        std::optional<Clock::time_point> deadline) {
  Impl& i = *impl_;
  const auto longest = std::max(i.options.timeout, kLeastTuning);
  const Measured measured = agree_on_costs(
      i.state, i.rounds, i.scratch, known, i.cache.heaps() ? heap : nullptr,
      {deadline.value_or(deadline_in(Clock::now(), longest)), i.message_check, interrupt});
  i.cache.use(measured.costs);
  return measured.complete || !i.cache.heaps();
}

bool Communicator::all_have_heaps() const { return impl_->cache.heaps(); }

std::shared_ptr<Recorder> Communicator::recorder() const { return impl_->recorder; }
LastToCome Communicator::last_to_come() const { return impl_->last_to_come; }
MultiNodeState& Communicator::whole() const { return impl_->state.header().whole; }

std::vector<std::vector<int>> Communicator::hosts() const {
  std::vector<std::vector<int>> found(1, std::vector<int>(static_cast<std::size_t>(size())));
  std::iota(found[0].begin(), found[0].end(), 0);
  return found;
}

std::string Communicator::describe() const { return impl_->fabric->describe(); }
std::span<std::byte> Communicator::heap(int rank) const { return impl_->fabric->heap(rank); }

}  // namespace dreamcomm
