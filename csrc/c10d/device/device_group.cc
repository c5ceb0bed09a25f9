#include "c10d/device/device_group.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <vector>

#include "c10d/base/convert.h"
#include "c10d/device/bootstrap_exchange.h"
#include "gpu/host/supported_ops.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

/// Ranks that close a group together do so within this time, or the memory stays.
constexpr milliseconds kClosing{5'000};

/// Of a message's kernel: one waits in each pair and way, beside the collectives'.
constexpr int kMessageBlocks = 4;

/// Of torch's streams. It may outlive the backend, as tensors do.
std::function<bool(const c10::Stream&)> capture_test(const DeviceKind& kind) {
  return [kind](const c10::Stream& stream) {
    return kind.is_capturing(c10::impl::VirtualGuardImpl(kind.type).getStreamNativeHandle(stream));
  };
}

}  // namespace

DeviceGroup::DeviceGroup(std::shared_ptr<Communicator> comm, DeviceKind kind, Interrupt interrupt,
                         LongestWait rendezvous_timeout, std::optional<DeviceHosts> hosts)
    : comm_(std::move(comm)),
      kind_(std::move(kind)),
      interrupt_(std::move(interrupt)),
      rendezvous_timeout_(std::move(rendezvous_timeout)),
      hosts_(std::move(hosts)) {}

int DeviceGroup::number(int rank) const {
  if (!hosts_) return rank;
  const Topology& all = hosts_->place.topology;
  return all.rank_at(all.host_of(hosts_->place.rank), rank);
}

std::string DeviceGroup::about_host() const {
  if (!hosts_) return "";
  const Topology& all = hosts_->place.topology;
  return concat("on ", all.words(all.host_of(hosts_->place.rank)), ", here numbered from 0 on: ");
}

/// Kernels know a peer by its number in their group.
gpu::PeerReports DeviceGroup::peer_reports(std::vector<int> ranks) const {
  return {.lost = [comm = comm_] { return comm->lost(); },
          .does =
              [comm = comm_, ranks = std::move(ranks)](int rank) {
                return concat("of calls on CPU tensors it ",
                              comm->does(ranks.at(static_cast<std::size_t>(rank))));
              }};
}

/// Of all groups: whoever has gone is waited for in vain in each.
void DeviceGroup::watch() {
  if (watchdog_) return;
  watchdog_ = std::make_unique<DeviceWatchdog>([comm = comm_] { return !comm->lost().empty(); },
                                               [this] { abort(); });
}

void DeviceGroup::settle_on(c10::Device device) {
  const std::scoped_lock lock(mutex_);
  if (!device_) device_ = device;
  TORCH_CHECK_VALUE(
      *device_ == device, "rank ", number(comm_->rank()), ": this group's calls are on ", *device_,
      ", that of its first tensor, got a tensor on ", device, "; make a group for each device");
}

bool DeviceGroup::serves(const at::Tensor& tensor, const std::optional<Reduction>& reduction) {
  if (!may_carry(tensor)) return false;
  if (reduction && !gpu::computed_as(*reduction)) return false;
  return serves(tensor.device());
}

bool DeviceGroup::serves(c10::Device device) {
  settle_on(device);
  const auto outcome = [this]() -> std::optional<bool> {
    const std::scoped_lock lock(mutex_);
    return met_ ? std::optional(all_ != nullptr) : std::nullopt;
  };
  if (const std::optional<bool> known = outcome()) return *known;
  const std::scoped_lock meeting(meeting_);
  if (const std::optional<bool> known = outcome()) return *known;
  return meet();
}

/// Ranks that meet allocate memory, which ends a capture.
void DeviceGroup::require_no_capture() const {
  const c10::Stream current = c10::impl::VirtualGuardImpl(kind_.type).getStream(*device_);
  TORCH_CHECK_WITH(DistBackendError, !capture_test(kind_)(current), "rank ", number(comm_->rank()),
                   ": a graph cannot capture a group's first call on a device, or the first "
                   "message between two ranks: make one before the capture");
}

bool DeviceGroup::is_registered(const void* address) const {
  const std::scoped_lock lock(mutex_);
  return heap_ && heap_->holds(address);
}

/// torch deals out the streams of a pool in turns: two lanes on one would wait for each other.
c10::Stream DeviceGroup::make_stream() {
  constexpr int kTries = 64;
  const c10::impl::VirtualGuardImpl guard(kind_.type);
  const std::scoped_lock lock(mutex_);
  c10::Stream made = guard.getStreamFromGlobalPool(*device_, true);
  for (int i = 0; i < kTries && std::count(streams_.begin(), streams_.end(), made) > 0; ++i) {
    made = guard.getStreamFromGlobalPool(*device_, true);
  }
  streams_.push_back(made);
  return made;
}

StreamQueue::Ways DeviceGroup::ways() {
  return {.is_capturing = capture_test(kind_),
          .is_registered = [this](const void* address) { return is_registered(address); },
          .make_stream = [this] { return make_stream(); }};
}

bool DeviceGroup::meet() {
  const c10::DeviceGuard here(*device_);
  require_no_capture();
  gpu::BootstrapResult meeting;
  try {
    meeting = gpu::bootstrap(comm_->rank(), comm_->size(), kind_.make_driver, kind_.options,
                             exchange_among_all(*comm_, rendezvous_timeout_, interrupt_),
                             rendezvous_timeout_());
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
  std::shared_ptr<gpu::Communicator> group = std::move(meeting.group);
  std::unique_ptr<MultinodeDeviceGroup> span =
      hosts_ ? meet_hosts(group, meeting.why_not) : nullptr;
  const std::scoped_lock lock(mutex_);
  met_ = true;
  why_not_ = std::move(meeting.why_not);
  if (!group) return false;
  if (group->heap()) {
    heap_ = std::make_shared<DeviceHeap>(group->heap(), kind_.options.heap_bytes, *device_,
                                         capture_test(kind_));
  }
  std::vector<int> everyone(static_cast<std::size_t>(comm_->size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  all_ = std::make_shared<StreamQueue>(group, *device_, ways(), about_host(),
                                       peer_reports(std::move(everyone)), std::move(span));
  watch();
  return true;
}

/// After it, `group` is null where it was on any host.
std::unique_ptr<MultinodeDeviceGroup> DeviceGroup::meet_hosts(
    std::shared_ptr<gpu::Communicator>& group, std::string& why_not) {
  if (!group) why_not = about_host() + why_not;
  try {
    MultinodeSetup met = dreamcomm::meet_hosts(group, why_not, *hosts_, *device_);
    if (met.span) return std::move(met.span);
    why_not = std::move(met.why_not);
    if (group) group->close(exchange_among_all(*comm_, rendezvous_timeout_, interrupt_));
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
  group = nullptr;
  return nullptr;
}

c10::intrusive_ptr<DeviceWork> DeviceGroup::issue(const DevicePlan& plan, Calls& calls) {
  QueuePtr queue;
  {
    const std::scoped_lock lock(mutex_);
    queue = all_;
  }
  return queue->issue(number(comm_->rank()), plan, calls);
}

bool DeviceGroup::may_carry(const at::Tensor& tensor) const {
  return tensor.device().type() == kind_.type && tensor.layout() == at::kStrided;
}

std::optional<DeviceGroup::Pair> DeviceGroup::pair_with(int peer) const {
  const std::scoped_lock lock(mutex_);
  const auto known = pairs_.find(peer);
  return known == pairs_.end() ? std::nullopt : std::optional(known->second);
}

bool DeviceGroup::meets_with(int peer, c10::Device device) {
  settle_on(device);
  std::optional<Pair> pair = pair_with(peer);
  if (!pair) {
    const std::scoped_lock meeting(meeting_in_pairs_);
    pair = pair_with(peer);
    if (!pair) return meet_pair(peer);
  }
  TORCH_CHECK_WITH(DistBackendError, pair->broken.empty(), "rank ", number(comm_->rank()),
                   ": the first message between this rank and rank ", number(peer),
                   " was cut off: ", pair->broken, "; make a new group");
  return pair->to && pair->from;
}

bool DeviceGroup::meet_pair(int peer) {
  const c10::DeviceGuard here(*device_);
  require_no_capture();
  const int me = comm_->rank();
  const bool lower = me < peer;
  QueuePtr up;
  QueuePtr down;
  try {  // the same way first on both
    up = meet_one_way(std::min(me, peer), std::max(me, peer));
    down = meet_one_way(std::max(me, peer), std::min(me, peer));
  } catch (const std::exception& error) {
    // Half a meeting cannot be made up for: what was sent in it is still under way.
    {
      const std::scoped_lock lock(mutex_);
      pairs_[peer].broken = error.what();
    }
    TORCH_CHECK_WITH(DistBackendError, false, "rank ", number(me), " did not meet rank ",
                     number(peer), " for the first message between them: ", error.what(),
                     ". Two ranks wait for each other then: batch first messages "
                     "(batch_isend_irecv), or make them in one order");
  }
  const std::scoped_lock lock(mutex_);
  pairs_[peer] = {.to = lower ? up : down, .from = lower ? down : up};
  if (up || down) watch();
  return up && down;
}

DeviceGroup::QueuePtr DeviceGroup::meet_one_way(int from, int to) {
  const bool sends = comm_->rank() == from;
  gpu::CommunicatorOptions options = kind_.options;
  options.most_blocks = std::min(options.most_blocks, kMessageBlocks);
  options.heap_bytes = 0;
  gpu::BootstrapResult meeting = gpu::bootstrap(
      sends ? 0 : 1, 2, kind_.make_driver, options,
      exchange_with(*comm_, sends ? to : from, from, rendezvous_timeout_, interrupt_),
      rendezvous_timeout_());
  if (!meeting.group) {
    const std::scoped_lock lock(mutex_);
    why_not_ =
        concat("messages between ranks ", number(from), " and ", number(to), ": ", meeting.why_not);
    return nullptr;
  }
  return std::make_shared<StreamQueue>(
      std::move(meeting.group), *device_, ways(),
      concat("a message of rank ", number(from), " to rank ", number(to), ", here ranks 0 and 1: "),
      peer_reports({from, to}));
}

c10::intrusive_ptr<DeviceWork> DeviceGroup::send(const DevicePlan& plan, const at::Tensor& tensor,
                                                 int to) {
  at::Tensor memory = tensor;
  if (!is_plain(tensor)) {
    memory = blank_like(tensor);
    copy_into(memory, tensor);
  }
  Calls calls;
  calls.emplace_back(Kind::kBroadcast, moving(tensor), 0).in_place(memory);
  return pair_with(to)->to->issue(number(comm_->rank()), plan, calls);
}

c10::intrusive_ptr<DeviceWork> DeviceGroup::receive(const DevicePlan& plan,
                                                    const at::Tensor& tensor, int from) {
  Calls calls;
  calls.emplace_back(Kind::kBroadcast, moving(tensor), 0).output(tensor);
  return pair_with(from)->from->issue(number(comm_->rank()), plan, calls);
}

at::Tensor DeviceGroup::allocate(std::int64_t size, const at::TensorOptions& options) {
  const c10::Device given = options.device();
  const c10::impl::VirtualGuardImpl guard(kind_.type);
  const c10::Device device = given.has_index() ? given : guard.getDevice();
  std::shared_ptr<DeviceHeap> heap;
  if (allocates() && serves(device) && !failure()) {
    const std::scoped_lock lock(mutex_);
    heap = heap_;
  }
  at::Tensor made = heap ? heap->allocate(size, options) : at::Tensor();
  if (failure()) made = at::Tensor();  // a peer may still write to memory of the call that failed
  return made.defined() ? made : at::empty({size}, options.device(device));
}

bool DeviceGroup::holds(const at::Tensor& tensor) const {
  const std::scoped_lock lock(mutex_);
  return heap_ && may_carry(tensor) && tensor.numel() > 0 && heap_->holds(tensor.const_data_ptr());
}

std::vector<DeviceGroup::QueuePtr> DeviceGroup::queues() const {
  const std::scoped_lock lock(mutex_);
  std::vector<QueuePtr> all;
  if (all_) all.push_back(all_);
  for (const auto& [peer, pair] : pairs_) {
    if (pair.to) all.push_back(pair.to);
    if (pair.from) all.push_back(pair.from);
  }
  return all;
}

std::optional<Error> DeviceGroup::failure() const {
  for (const QueuePtr& queue : queues()) {
    if (std::optional<Error> failed = queue->failure()) return failed;
  }
  return std::nullopt;
}

void DeviceGroup::abort() {
  for (const QueuePtr& queue : queues()) queue->abort();
}

/// Between looks at whether kernels are done: they may wait for a rank that is gone.
void DeviceGroup::pause() const {
  interrupt_();
  if (const auto failed = comm_->failure()) throw Error(ErrorKind::kAborted, *failed);
}

void DeviceGroup::leave_all() {
  for (const QueuePtr& queue : queues()) {
    try {
      queue->leave(interrupt_);
    } catch (const Error& error) {
      TORCH_WARN("dreamcomm: a device's kernels: ", error.what());
    }
  }
}

void DeviceGroup::close(bool together) {
  close_queues(together);
  std::unique_ptr<DeviceWatchdog> over;  // ends behind the lock, which its thread may wait for
  const std::scoped_lock lock(mutex_);
  std::swap(over, watchdog_);
}

void DeviceGroup::close_queues(bool together) {
  if (!together || comm_->failure()) return leave_all();
  try {
    close_together();
  } catch (const Error& error) {
    // Ranks that are gone cannot agree: the memory stays until the process ends.
    leave_all();
    if (comm_->failure()) return;
    TORCH_WARN("dreamcomm: a group's memory on ", *device_,
               " is kept until the process ends: ", error.what());
  }
}

/// Pairs in the order in which all ranks take them: rank r's come by peer.
void DeviceGroup::close_together() {
  const Interrupt pause = [this] { this->pause(); };
  const LongestWait closing = [] { return kClosing; };
  std::map<int, Pair> pairs;
  {
    const std::scoped_lock lock(mutex_);
    pairs = pairs_;
  }
  const int me = comm_->rank();
  for (const auto& [peer, pair] : pairs) {
    const std::array<std::pair<QueuePtr, int>, 2> ways{{{pair.to, me}, {pair.from, peer}}};
    for (const bool from_lower : {true, false}) {
      for (const auto& [queue, from] : ways) {
        if (!queue || (from == std::min(me, peer)) != from_lower) continue;
        queue->close(exchange_with(*comm_, peer, from, closing, interrupt_), pause);
      }
    }
  }
  QueuePtr all;
  {
    const std::scoped_lock lock(mutex_);
    all = all_;
  }
  if (all) all->close(exchange_among_all(*comm_, closing, interrupt_), pause);
}

std::array<WireTraffic, kKinds> DeviceGroup::traffic() const {
  const std::scoped_lock lock(mutex_);
  if (!all_ || !all_->span()) return {};
  return all_->span()->traffic();
}

Fallback::Inner DeviceGroup::engine() const {
  const std::scoped_lock lock(mutex_);
  return all_ && all_->span() ? all_->span()->engine() : Fallback::Inner();
}

std::string DeviceGroup::describe() const {
  const std::scoped_lock lock(mutex_);
  if (!all_) return why_not_;
  return concat(all_->group()->describe(),
                hosts_ ? " of this host; between hosts torch's own group" : "",
                heap_ ? concat("; ", heap_->describe()) : "");
}

std::string DeviceGroup::explain(Kind kind, std::size_t bytes) const {
  const std::scoped_lock lock(mutex_);
  return all_ ? concat("; ", all_->group()->explain(kind, bytes)) : "";
}

}  // namespace dreamcomm
