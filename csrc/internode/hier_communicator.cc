#include "internode/hier_communicator.h"

#include <array>
#include <iomanip>
#include <sstream>
#include <type_traits>
#include <utility>

#include "comm/validate.h"
#include "core/counts.h"
#include "core/error.h"
#include "internode/call_record.h"
#include "internode/collectives/call_handshake.h"
#include "internode/collectives/dispatch.h"
#include "internode/collectives/leader_path.h"
#include "internode/tuning/measure.h"
#include "internode/tuning/timed_calls.h"

namespace dreamcomm {
namespace {

std::string describe_way(Kind kind, const Way& way, int carriers) {
  if (way.leaders) return "one leader per host exchanges it, whole, as the call opens";
  const std::string at_a_time = concat(", ", way.chunk, " bytes at a time");
  switch (kind) {
    case Kind::kAllGather:
      return "each rank sends its block to one rank of every other host" + at_a_time;
    case Kind::kReduceScatter:
      return "what a host adds up for a rank of another is sent to it" + at_a_time;
    case Kind::kGather:
    case Kind::kScatter:
    case Kind::kAllToAll:
      return "blocks go straight from rank to rank" + at_a_time;
    default:
      if (carriers == 1) return "one rank of each host carries it between hosts" + at_a_time;
      return concat(carriers, " ranks of each host carry a share between hosts", at_a_time);
  }
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

HierarchicalCommunicator::HierarchicalCommunicator(std::shared_ptr<Communicator> host,
                                                   Topology topology, int rank,
                                                   std::unique_ptr<Link> link,
                                                   HierarchicalOptions options)
    : host_(std::move(host)),
      topology_(std::move(topology)),
      rank_(rank),
      link_(std::move(link)),
      options_(std::move(options)),
      monitor_(*link_, interrupter_, topology_, rank_),
      levels_{*host_,           topology_,      *link_,        interrupter_,
              monitor_,         preposted_,     options_.heap, call_failed_,
              options_.reasons, failure_cause_, rank_,         options_.widens_halves},
      recorder_(options_.recorder ? options_.recorder
                                  : std::make_shared<Recorder>(Recorder::Origin{})) {
  if (options_.board) {
    barrier_.emplace(InternodeBarrier::Means{options_.board, monitor_, failure_cause_}, topology_,
                     rank_, host_->who());
  }
}

HierarchicalCommunicator::~HierarchicalCommunicator() {
  close();
  host_->set_remote_messages({});
}

/// The ranks of this host get the reason first, then the others, which read it when the link ends.
void HierarchicalCommunicator::abort(const std::string& reason) {
  host_->abort(reason);
  if (messages_) messages_->fail_all(ErrorKind::kAborted, reason);
  if (reasons_posted_.take() == 0) {
    report_lost_leader();
    options_.reasons.post_abort(rank_, reason);
  }
  close();
}

void HierarchicalCommunicator::shutdown() {
  host_->shutdown();
  close();
}

void HierarchicalCommunicator::close() {
  link_->close();
  interrupter_.interrupt();
  if (messages_) messages_->close("the group was shut down");
}

void HierarchicalCommunicator::carry_messages(std::unique_ptr<Link> link) {
  messages_ = std::make_unique<InternodeTagMatcher>(
      std::move(link), topology_, rank_,
      InternodeTagMatcher::Options{
          host_->who(), failure_cause_,
          [this](const Completion& completion) { host_->withdraw(completion); },
          [this] { host_->ring(); }, [this](const std::string& reason) { abort(reason); },
          [this](const std::string& text) { host_->warn(text); }, host_->whole(), *recorder_});
  host_->set_remote_messages(
      {[this](const Completion& completion) { return messages_->lacks(completion); },
       [this](const std::string& why) { messages_->be_alone(why); }});
}

std::shared_ptr<Completion> HierarchicalCommunicator::send(const Cargo& cargo, int peer,
                                                           std::uint64_t tag,
                                                           Clock::time_point deadline) {
  if (is_near(peer)) return host_->send(cargo, topology_.index_of(peer), tag, deadline);
  host_->check_usable("send");
  return messages_->send(cargo, peer, tag, deadline);
}

std::shared_ptr<Completion> HierarchicalCommunicator::receive(const Cargo& cargo,
                                                              std::optional<int> peer,
                                                              std::uint64_t tag,
                                                              Clock::time_point deadline) {
  if (peer && is_near(*peer)) {
    return host_->receive(cargo, topology_.index_of(*peer), tag, deadline);
  }
  host_->check_usable("recv");
  if (peer) return messages_->receive(cargo, *peer, tag, deadline);
  std::shared_ptr<Completion> completion = host_->receive(cargo, std::nullopt, tag, deadline);
  messages_->receive_any(cargo, tag, deadline, completion);
  return completion;
}

void HierarchicalCommunicator::monitored_barrier(std::chrono::milliseconds timeout, bool all,
                                                 const Interrupt& interrupt, std::int64_t issued) {
  const bool leads = topology_.index_of(rank_) == 0;
  check(!leads || barrier_, ErrorKind::kInvalid, "monitored_barrier on ", host_->who(),
        ": its leaders have no board to post on");
  try {
    host_->monitored_barrier(timeout, all, interrupt, issued, leads ? &*barrier_ : nullptr);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kPeerLost) report_lost_leader();
    throw;
  }
}

/// A killed leader cannot report its end to the other nodes: the ranks of its host do, and know
/// what it called last.
void HierarchicalCommunicator::report_lost_leader() const {
  if (topology_.index_of(rank_) == 0) return;
  const std::string words = host_->lost(0);
  if (words.empty() || !options_.reasons.tell) return;
  options_.reasons.tell(topology_.rank_at(topology_.host_of(rank_), 0), words);
}

void HierarchicalCommunicator::wait_for_readers() {
  if (barrier_) barrier_->wait_for_readers();
}

void HierarchicalCommunicator::run(const Request& request, const Interrupt& interrupt) {
  host_->run_in_turn([&] { run_ordered(request, interrupt); }, interrupt);
}

void HierarchicalCommunicator::submit(std::function<void()> job) { host_->submit(std::move(job)); }

void HierarchicalCommunicator::run_in_turn(const std::function<void()>& job,
                                           const Interrupt& interrupt) {
  host_->run_in_turn(job, interrupt);
}

void HierarchicalCommunicator::wait(Completion& completion, const Interrupt& interrupt) {
  host_->wait(completion, interrupt);
}

void HierarchicalCommunicator::cancel(const Completion& completion) { host_->cancel(completion); }

std::optional<std::string> HierarchicalCommunicator::failure() const { return host_->failure(); }

std::optional<ErrorKind> HierarchicalCommunicator::failure_kind() const {
  return host_->failure_kind();
}

bool HierarchicalCommunicator::has_ended(int rank) const {
  return rank >= 0 && rank < size() && is_near(rank) && host_->has_ended(topology_.index_of(rank));
}

std::string HierarchicalCommunicator::who() const { return host_->who(); }

std::string HierarchicalCommunicator::does(int rank) const {
  if (is_near(rank)) return host_->does(topology_.index_of(rank));
  return concat("runs on ", topology_.words(topology_.host_of(rank)));
}

std::string HierarchicalCommunicator::awaited(Clock::duration waited) const {
  return host_->awaited(waited);
}

std::string HierarchicalCommunicator::awaited(const Completion& completion,
                                              Clock::duration waited) const {
  return host_->awaited(completion, waited);
}

void HierarchicalCommunicator::run_ordered(const Request& request, const Interrupt& interrupt) {
  validate(request, rank_, topology_.size());
  if (request.reduction.counts != nullptr) request.reduction.counts->require();
  const Way taken = way_of(request);
  CallRecord call(host_->whole(), *recorder_, clock_, request);
  LinkContext context(levels_, request, calls_++, taken.chunk, interrupt);
  context.note_in(call.timeline(), call.number());
  abort_on_error(request, [&] { run(context, request, taken.leaders); });
  call.done(context, taken, std::max(costs_.between.latency, taken.leaders ? taken.seconds : 0));
}

/// A rank whose call fails aborts the group: its next call would match no peer's.
template <typename Act>
void HierarchicalCommunicator::abort_on_error(const Request& request, Act&& act) {
  try {
    act();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kMismatch) throw;
    const std::string call = dreamcomm::describe(request);
    const std::string what = error.what();
    const std::string reason = what.starts_with(call) ? what : concat(call, ": ", what);
    abort(reason);
    throw Error(error.kind(), reason);
  } catch (...) {
    abort(concat(dreamcomm::describe(request), " was interrupted on rank ", rank_));
    throw;
  }
}

void HierarchicalCommunicator::run(LinkContext& context, const Request& request, bool leaders) {
  const std::function<std::string()> why = [&] { return concat(": ", *request.refusal); };
  handshake(context, signature_of(request, calls_ - before_, Signature::kNoRow),
            {options_.group, request.refusal == nullptr ? options_.call_site : why},
            opening_part(context, request, leaders));
  if (!leaders) internode::run(context, request);
}

Way HierarchicalCommunicator::way(Kind kind, std::size_t bytes) const {
  if (options_.choose) return options_.choose(kind, bytes);
  return best_way(kind, bytes, Shape(topology_.ranks_on_hosts()), costs_);
}

Way HierarchicalCommunicator::way_of(const Request& request) {
  const std::size_t bytes = wire_bytes(request, options_.widens_halves);
  if (!last_ || last_->kind != request.kind || last_->bytes != bytes) {
    last_ = {request.kind, bytes, way(request.kind, bytes)};
  }
  return last_->way;
}

void HierarchicalCommunicator::tune(Clock::time_point deadline, const Interrupt& interrupt) {
  Request opaque;  // bytes that are only moved
  opaque.deadline = deadline;
  const auto all = [&] {
    LevelCosts costs{host_->costs()};
    static_assert(std::is_trivially_copyable_v<LevelCosts>);
    const auto take_those_of_rank_0 = [&] {
      const Block block{reinterpret_cast<std::byte*>(&costs), sizeof costs};
      Request request = opaque;
      request.kind = Kind::kBroadcast;
      request.in = {&block, rank_ == 0 ? 1U : 0U};
      request.out = {&block, 1};
      run_uncounted(request, {.leaders = true}, interrupt);
    };
    take_those_of_rank_0();
    const Clock::time_point begin = Clock::now();
    const auto of_all = [&](double seconds) { return slowest(seconds, deadline, interrupt); };
    const InStep in_step{
        [&](const Request& request, const Way& way) { run_uncounted(request, way, interrupt); },
        of_all};
    const Trials trials{[&](const Burst& burst) {
                          double seconds = 0;
                          LinkContext context(levels_, opaque, calls_++, 0, interrupt);
                          abort_on_error(opaque,
                                         [&] { seconds = time_of_messages(context, burst); });
                          return of_all(seconds);
                        },
                        [&](std::size_t bytes, const Way& way) {
                          return of_all(time_of_calls(in_step, bytes, way, deadline));
                        },
                        [&] { return of_all(seconds_since(begin)); }};
    costs.between = measure_wire(trials, Shape(topology_.ranks_on_hosts()), costs.here);
    take_those_of_rank_0();  // the same trials might be fitted otherwise by another processor
    costs_ = costs;
    last_.reset();
    before_ = calls_;
    host_->reset_traffic();
  };
  host_->run_in_turn(all, interrupt);
}

void HierarchicalCommunicator::sync(Clock::time_point deadline, const Interrupt& interrupt) {
  Request barrier;
  barrier.deadline = deadline;
  const auto all = [&] {
    run_uncounted(barrier, {.leaders = true}, interrupt);
    before_ = calls_;
    host_->reset_traffic();
  };
  host_->run_in_turn(all, interrupt);
}

/// Runs a request with a call's deadline and errors, but without its record and count.
void HierarchicalCommunicator::run_uncounted(const Request& request, const Way& way,
                                             const Interrupt& interrupt) {
  LinkContext context(levels_, request, calls_++, way.chunk, interrupt);
  abort_on_error(request, [&] { run(context, request, way.leaders); });
}

/// The most seconds that any rank gives.
double HierarchicalCommunicator::slowest(double seconds, Clock::time_point deadline,
                                         const Interrupt& interrupt) {
  const Block block{reinterpret_cast<std::byte*>(&seconds), sizeof seconds};
  Request request;
  request.kind = Kind::kAllReduce;
  request.reduction = {.dtype = DType::kFloat64, .op = ReduceOp::kMax};
  request.in = request.out = {&block, 1};
  request.deadline = deadline;
  run_uncounted(request, {.leaders = true}, interrupt);
  return seconds;
}

std::string HierarchicalCommunicator::describe() const {
  return concat(topology_.hosts(), " hosts: ", topology_.words(), "; between them ",
                link_->describe());
}

std::vector<std::vector<int>> HierarchicalCommunicator::hosts() const {
  std::vector<std::vector<int>> found;
  for (int host = 0; host < topology_.hosts(); ++host) {
    const std::span<const int> ranks = topology_.ranks(host);
    found.emplace_back(ranks.begin(), ranks.end());
  }
  return found;
}

Communicator& HierarchicalCommunicator::single_host(const char* what) {
  throw Error(ErrorKind::kInvalid,
              concat(what, " of groups within one host; this one spans ", describe()));
}

Prediction HierarchicalCommunicator::predict(Kind kind, std::size_t bytes,
                                             bool /*in_heaps*/) const {
  const Way taken = way(kind, bytes);
  return {taken.leaders ? "leaders" : "carriers", taken.seconds};
}

std::string HierarchicalCommunicator::explain(Kind kind, std::size_t bytes,
                                              bool /*in_heaps*/) const {
  if (kind == Kind::kBarrier) bytes = 0;
  if (kind == Kind::kSend || kind == Kind::kRecv) {
    return concat(name(kind),
                  ": shared memory within a host; between nodes a header, and the bytes ",
                  "once it is matched (up to ", MessageHeader::kInline, " bytes with it)\n  (",
                  describe(), ')');
  }
  const Way taken = way(kind, bytes);
  std::ostringstream text;
  text << std::fixed << std::setprecision(0);
  text << name(kind) << " of " << bytes << " bytes a rank: hierarchical\n";
  for (const Way& one : ways(kind, bytes, Shape(topology_.ranks_on_hosts()), costs_)) {
    const bool is_taken = one.leaders == taken.leaders && one.chunk == taken.chunk;
    text << (is_taken ? "  * " : "    ") << one.seconds * 1e6 << " us: ";
    text << describe_way(kind, one, topology_.carriers()) << '\n';
  }
  text << "  (the least predicted time is taken, or leaders where they take 3 % more at the "
          "most; "
       << "between hosts " << costs_.between.words() << "; " << describe() << ')';
  return text.str();
}

std::array<Traffic, kKinds> HierarchicalCommunicator::traffic() const {
  std::array<Traffic, kKinds> all = host_->traffic();
  for (std::size_t i = 0; i < all.size(); ++i) {  // counts the group's calls, not their parts
    const auto kind = static_cast<Kind>(i);
    const bool is_message = kind == Kind::kSend || kind == Kind::kRecv;
    const auto calls = static_cast<std::uint64_t>(host_->whole().tallies[i].calls.read());
    all[i].calls = calls + (is_message ? all[i].calls : 0);
  }
  return all;
}

std::optional<std::array<WireTraffic, kKinds>> HierarchicalCommunicator::wire_traffic() const {
  std::array<WireTraffic, kKinds> all;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Tally& counts = host_->whole().tallies[i];
    all[i] = {static_cast<std::uint64_t>(counts.sent.read()),
              static_cast<std::uint64_t>(counts.received.read())};
  }
  return all;
}

}  // namespace dreamcomm
