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

/// A message's kernel has few blocks: one may wait in each pair and way, beside a collective's.
constexpr int kMessageBlocks = 4;

/// Tests torch's streams. It may outlive the backend, as tensors do.
std::function<bool(const c10::Stream&)> capture_test(const DeviceKind& kind) {
  return [kind](const c10::Stream& stream) {
    return kind.is_capturing(c10::impl::VirtualGuardImpl(kind.type).getStreamNativeHandle(stream));
  };
}

}  // namespace

DeviceGroup::DeviceGroup(std::shared_ptr<Communicator> host, DeviceKind kind, Interrupt interrupt,
                         LongestWait rendezvous_timeout, std::optional<DeviceNodes> nodes)
    : host_(std::move(host)),
      kind_(std::move(kind)),
      interrupt_(std::move(interrupt)),
      rendezvous_timeout_(std::move(rendezvous_timeout)),
      nodes_(std::move(nodes)) {}

int DeviceGroup::number(int index) const {
  if (!nodes_) return index;
  const Topology& all = nodes_->place.topology;
  return all.rank_at(all.host_of(nodes_->place.rank), index);
}

std::optional<int> DeviceGroup::index_of(int rank) const {
  if (!nodes_) return rank;
  const Topology& all = nodes_->place.topology;
  const bool is_near = all.host_of(rank) == all.host_of(nodes_->place.rank);
  return is_near ? std::optional(all.index_of(rank)) : std::nullopt;
}

std::string DeviceGroup::about_host() const {
  if (!nodes_) return "";
  const Topology& all = nodes_->place.topology;
  return concat("on ", all.words(all.host_of(nodes_->place.rank)), ", here numbered from 0 on: ");
}

/// Kernels know a peer by its number in their group.
gpu::PeerReports DeviceGroup::peer_reports(std::vector<int> ranks) const {
  return {.lost = [host = host_] { return host->lost(); },
          .does =
              [host = host_, ranks = std::move(ranks)](int rank) {
                return concat("of calls on CPU tensors it ",
                              host->does(ranks.at(static_cast<std::size_t>(rank))));
              }};
}

/// Watches for all queues: a rank that ended is missing in each.
void DeviceGroup::watch() {
  if (watchdog_) return;
  watchdog_ = std::make_unique<DeviceWatchdog>([host = host_] { return !host->lost().empty(); },
                                               [this] { abort(); });
}

void DeviceGroup::settle_on(c10::Device device) {
  const std::scoped_lock lock(mutex_);
  if (!device_) device_ = device;
  TORCH_CHECK_VALUE(
      *device_ == device, "rank ", number(host_->rank()), ": this group's calls are on ", *device_,
      ", that of its first tensor, got a tensor on ", device, "; make a group for each device");
}

bool DeviceGroup::serves(const at::Tensor& tensor, const std::optional<Reduction>& reduction) {
  if (!handles(tensor)) return false;
  if (reduction && !gpu::computed_as(*reduction)) return false;
  return serves(tensor.device());
}

bool DeviceGroup::serves(c10::Device device) {
  settle_on(device);
  const auto outcome = [this]() -> std::optional<bool> {
    const std::scoped_lock lock(mutex_);
    return bootstrapped_ ? std::optional(all_ != nullptr) : std::nullopt;
  };
  if (const std::optional<bool> known = outcome()) return *known;
  const std::scoped_lock one_at_a_time(bootstrap_mutex_);
  if (const std::optional<bool> known = outcome()) return *known;
  return bootstrap();
}

/// A bootstrap allocates memory, which ends a capture.
void DeviceGroup::require_no_capture() const {
  const c10::Stream current = c10::impl::VirtualGuardImpl(kind_.type).getStream(*device_);
  TORCH_CHECK_WITH(DistBackendError, !capture_test(kind_)(current), "rank ", number(host_->rank()),
                   ": a graph cannot capture a group's first call on a device, or the first "
                   "message between two ranks: make one before the capture");
}

bool DeviceGroup::is_registered(const void* address) const {
  const std::scoped_lock lock(mutex_);
  return heap_ && heap_->holds(address);
}

/// torch deals out the streams of a pool in turns: two queues on one would wait for each other.
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

bool DeviceGroup::bootstrap() {
  const c10::DeviceGuard here(*device_);
  require_no_capture();
  gpu::BootstrapResult made;
  try {
    made = gpu::bootstrap(host_->rank(), host_->size(), kind_.make_driver, kind_.options,
                          exchange_among_all(*host_, rendezvous_timeout_, interrupt_),
                          rendezvous_timeout_());
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
  std::shared_ptr<gpu::Communicator> group = std::move(made.group);
  std::unique_ptr<MultinodeDeviceGroup> multinode =
      nodes_ ? bootstrap_nodes(group, made.why_not) : nullptr;
  const std::scoped_lock lock(mutex_);
  bootstrapped_ = true;
  why_not_ = std::move(made.why_not);
  if (!group) return false;
  if (group->heap()) {
    heap_ = std::make_shared<DeviceHeap>(group->heap(), kind_.options.heap_bytes, *device_,
                                         capture_test(kind_));
  }
  std::vector<int> everyone(static_cast<std::size_t>(host_->size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  all_ = std::make_shared<StreamQueue>(group, *device_, ways(), about_host(),
                                       peer_reports(std::move(everyone)), std::move(multinode));
  watch();
  return true;
}

/// Afterwards `group` is null on all hosts if it was on one.
std::unique_ptr<MultinodeDeviceGroup> DeviceGroup::bootstrap_nodes(
    std::shared_ptr<gpu::Communicator>& group, std::string& why_not) {
  if (!group) why_not = about_host() + why_not;
  try {
    MultinodeSetup made = set_up_nodes(group, why_not, *nodes_, *device_);
    if (made.group) return std::move(made.group);
    why_not = std::move(made.why_not);
    if (group) group->close(exchange_among_all(*host_, rendezvous_timeout_, interrupt_));
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
  return queue->issue(number(host_->rank()), plan, calls);
}

std::optional<DeviceGroup::Pair> DeviceGroup::pair_with(int peer) const {
  const std::scoped_lock lock(mutex_);
  const auto known = pairs_.find(peer);
  return known == pairs_.end() ? std::nullopt : std::optional(known->second);
}

bool DeviceGroup::connects_with(int rank, c10::Device device) {
  const std::optional<int> index = index_of(rank);
  if (!index) return false;
  const int peer = *index;
  settle_on(device);
  std::optional<Pair> pair = pair_with(peer);
  if (!pair) {
    const std::scoped_lock one_at_a_time(pairs_mutex_);
    pair = pair_with(peer);
    if (!pair) return bootstrap_pair(peer);
  }
  TORCH_CHECK_WITH(DistBackendError, pair->broken.empty(), "rank ", number(host_->rank()),
                   ": the first message between this rank and rank ", number(peer),
                   " was cut off: ", pair->broken, "; make a new group");
  return pair->to && pair->from;
}

bool DeviceGroup::bootstrap_pair(int peer) {
  const c10::DeviceGuard here(*device_);
  require_no_capture();
  const int me = host_->rank();
  const bool lower = me < peer;
  QueuePtr up;
  QueuePtr down;
  try {  // the same way first on both
    up = bootstrap_one_way(std::min(me, peer), std::max(me, peer));
    down = bootstrap_one_way(std::max(me, peer), std::min(me, peer));
  } catch (const std::exception& error) {
    // Half a bootstrap cannot be repeated: its messages are still under way.
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

DeviceGroup::QueuePtr DeviceGroup::bootstrap_one_way(int from, int to) {
  const bool sends = host_->rank() == from;
  gpu::CommunicatorOptions options = kind_.options;
  options.most_blocks = std::min(options.most_blocks, kMessageBlocks);
  options.heap_bytes = 0;
  gpu::BootstrapResult made = gpu::bootstrap(
      sends ? 0 : 1, 2, kind_.make_driver, options,
      exchange_with(*host_, sends ? to : from, from, rendezvous_timeout_, interrupt_),
      rendezvous_timeout_());
  if (!made.group) {
    const std::scoped_lock lock(mutex_);
    why_not_ =
        concat("messages between ranks ", number(from), " and ", number(to), ": ", made.why_not);
    return nullptr;
  }
  return std::make_shared<StreamQueue>(
      std::move(made.group), *device_, ways(),
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
  return pair_with(*index_of(to))->to->issue(number(host_->rank()), plan, calls);
}

c10::intrusive_ptr<DeviceWork> DeviceGroup::receive(const DevicePlan& plan,
                                                    const at::Tensor& tensor, int from) {
  Calls calls;
  calls.emplace_back(Kind::kBroadcast, moving(tensor), 0).output(tensor);
  return pair_with(*index_of(from))->from->issue(number(host_->rank()), plan, calls);
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
  return heap_ && handles(tensor) && tensor.numel() > 0 && heap_->holds(tensor.const_data_ptr());
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

/// Runs between looks at whether kernels are done: they may wait for a rank that has ended.
void DeviceGroup::pause() const {
  interrupt_();
  if (const auto failed = host_->failure()) throw Error(ErrorKind::kAborted, *failed);
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
  std::unique_ptr<DeviceWatchdog> over;  // destroyed after the lock, which its thread may wait for
  const std::scoped_lock lock(mutex_);
  std::swap(over, watchdog_);
}

void DeviceGroup::close_queues(bool together) {
  if (!together || host_->failure()) return leave_all();
  try {
    close_together();
  } catch (const Error& error) {
    // Without all ranks there is no agreement: the memory stays until the process ends.
    leave_all();
    if (host_->failure()) return;
    TORCH_WARN("dreamcomm: a group's memory on ", *device_,
               " is kept until the process ends: ", error.what());
  }
}

/// Closes the pairs by peer, the order on all ranks.
void DeviceGroup::close_together() {
  const Interrupt pause = [this] { this->pause(); };
  const LongestWait closing = [] { return kClosing; };
  std::map<int, Pair> pairs;
  {
    const std::scoped_lock lock(mutex_);
    pairs = pairs_;
  }
  const int me = host_->rank();
  for (const auto& [peer, pair] : pairs) {
    const std::array<std::pair<QueuePtr, int>, 2> ways{{{pair.to, me}, {pair.from, peer}}};
    for (const bool from_lower : {true, false}) {
      for (const auto& [queue, from] : ways) {
        if (!queue || (from == std::min(me, peer)) != from_lower) continue;
        queue->close(exchange_with(*host_, peer, from, closing, interrupt_), pause);
      }
    }
  }
  QueuePtr all;
  {
    const std::scoped_lock lock(mutex_);
    all = all_;
  }
  if (all) all->close(exchange_among_all(*host_, closing, interrupt_), pause);
}

std::array<WireTraffic, kKinds> DeviceGroup::traffic() const {
  const std::scoped_lock lock(mutex_);
  if (!all_ || !all_->multinode()) return {};
  return all_->multinode()->traffic();
}

void DeviceGroup::set_timeout(milliseconds timeout) {
  Fallback::Inner engine;
  {
    const std::scoped_lock lock(mutex_);
    if (all_ && all_->multinode()) engine = all_->multinode()->engine();
  }
  if (engine) set_timeout_of(*engine, timeout);
}

std::string DeviceGroup::explain(Kind kind, std::size_t bytes) const {
  const std::scoped_lock lock(mutex_);
  const std::string own =
      !all_ ? why_not_
            : concat(all_->group()->describe(),
                     nodes_ ? " of this host; between hosts torch's own group" : "",
                     heap_ ? concat("; ", heap_->describe()) : "", "; ",
                     all_->group()->explain(kind, bytes));
  return concat(own, "; what it does not do goes to torch's own NCCL group");
}

}  // namespace dreamcomm
