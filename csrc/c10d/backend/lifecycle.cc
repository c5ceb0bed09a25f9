// The life of a group: asked about, and ended.
#include <ATen/ops/empty.h>

#include <numeric>

#include "c10d/backend/backend.h"
#include "c10d/base/convert.h"
#include "c10d/base/gil_signals.h"
#include "c10d/process/process_heap.h"
#include "c10d/rendezvous/liveness.h"
#include "transport/window.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

/// How often a wait for the group's calls looks at Python's signals.
constexpr milliseconds kLook{50};

c10d::ErrorType to_error_type(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalid:
    case ErrorKind::kMismatch:
      return c10d::ErrorType::SUCCESS;  // the group stays usable
    case ErrorKind::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case ErrorKind::kPeerLost:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

}  // namespace

DreamBackend::~DreamBackend() { release_resources(); }

void DreamBackend::release_resources() {
  if (!process_.at_home()) {
    // A forked child has the group's memory but not its threads: let go of both
    // without ending them, as ending them would end the parent's group.
    new auto(std::move(device_));
    new auto(std::move(hierarchical_));
    new auto(std::move(liveness_));
    new auto(std::move(worker_));
    new auto(std::move(comm_));
    new auto(std::move(callback_threads_));
    new auto(fallback_.close());
    return;
  }
  without_gil([this] {
    try {
      close(true);
    } catch (const std::exception& error) {
      TORCH_WARN("dreamcomm: closing a group failed: ", error.what());
    }
    device_.reset();
    hierarchical_.reset();  // its calls have ended; it uses what follows
    liveness_.reset();
    worker_.reset();
    comm_.reset();
    heap_.reset();
    exit_hook_.reset();
    callbacks_ = {};
    visit_.reset();
    store_.reset();
  });
}

c10::intrusive_ptr<c10d::Backend::Options> DreamBackend::getBackendOptions() { return options_; }

void DreamBackend::require_one_host(const char* what) const {
  TORCH_CHECK_VALUE(!hierarchical_, what, " of groups within one host; this one spans ",
                    hierarchical_ ? hierarchical_->describe() : "");
}

void DreamBackend::setTimeout(milliseconds given) {
  const milliseconds timeout = bounded(given);
  TORCH_CHECK_VALUE(timeout.count() > 0, "rank ", rank_, ": expected a positive timeout, got ",
                    timeout.count(), " ms");
  timeout_ms_.set(timeout.count());
  options_->timeout = timeout;
  const auto pass_on = [timeout](auto& inner) {
    if constexpr (requires { inner.setTimeout(timeout); }) inner.setTimeout(timeout);
  };
  for (const Fallback::Inner& inner : fallback_.all()) pass_on(*inner);
  if (const Fallback::Inner engine = device_ ? device_->engine() : nullptr) pass_on(*engine);
}

uint64_t DreamBackend::getSequenceNumberForGroup() {
  return static_cast<uint64_t>(sequence_.read());
}

c10d::ErrorType DreamBackend::getError() {
  if (!comm_) return fallback_.get("cpu")->getError();
  std::optional<ErrorKind> kind = comm_->failure_kind();
  if (!kind && device_) {
    if (const std::optional<Error> failed = device_->failure()) kind = failed->kind();
  }
  return kind ? to_error_type(*kind) : c10d::ErrorType::SUCCESS;
}

void DreamBackend::require_home() const {
  TORCH_CHECK_WITH(DistBackendError, process_.at_home(), "rank ", rank_,
                   ": this process was forked from a rank and is none itself; make no calls on "
                   "the group here");
}

void DreamBackend::require_open() const {
  require_home();
  TORCH_CHECK_WITH(DistBackendError, closed_.read() == 0, "rank ", rank_,
                   ": this dreamcomm group was shut down; make a new one with new_group()");
}

bool DreamBackend::supportsTensorAlloc(c10::DeviceIndex index) {
  const bool on_cpu = index < 0;  // the devices with an index are accelerators
  return on_cpu || (device_ && device_->allocates());
}

at::Tensor DreamBackend::allocateTensor(long size, at::TensorOptions options) {
  const bool on_device = device_ && options.device().type() == device_->type();
  TORCH_CHECK_VALUE(options.device().is_cpu() || on_device, "rank ", rank_,
                    ": dreamcomm allocates tensors on cpu, and on cuda with its option cuda, got ",
                    options.device());
  TORCH_CHECK_VALUE(size >= 0, "rank ", rank_, ": expected a size from 0 on, got ", size);
  require_open();
  if (on_device) return device_->allocate(size, options);
  return heap_ ? allocate_tensor(*heap_, size, options) : at::empty({size}, options);
}

bool DreamBackend::holds(const Tensor& tensor) const { return device_ && device_->holds(tensor); }

std::array<Traffic, kKinds> DreamBackend::traffic() const {
  require_home();  // the counters lie in memory that children do not have
  if (!comm_) return {};
  std::array<Traffic, kKinds> all = comm_->traffic();
  if (!hierarchical_) return all;
  for (std::size_t i = 0; i < all.size(); ++i) {  // of calls the group's, not their parts
    const auto kind = static_cast<Kind>(i);
    const bool is_message = kind == Kind::kSend || kind == Kind::kRecv;
    const auto calls = static_cast<std::uint64_t>(comm_->whole().tallies[i].calls.read());
    all[i].calls = calls + (is_message ? all[i].calls : 0);
  }
  return all;
}

std::array<WireTraffic, kKinds> DreamBackend::traffic_between() const {
  std::array<WireTraffic, kKinds> all{};
  if (hierarchical_) all = hierarchical_->traffic();
  const std::array<WireTraffic, kKinds> on_devices =
      device_ ? device_->traffic() : std::array<WireTraffic, kKinds>{};
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].sent += on_devices[i].sent;
    all[i].received += on_devices[i].received;
  }
  return all;
}

std::string DreamBackend::transport() const {
  if (hierarchical_) return hierarchical_->describe();
  return comm_ ? comm_->transport() : concat("gloo, as no memory is shared: ", reason_);
}

bool DreamBackend::has_ended(int rank) const {
  require_rank(Site{"has_ended", rank_, size_}, "rank", rank);
  const std::optional<int> index = near(rank);
  return comm_ && index && comm_->has_ended(*index);
}

std::vector<std::vector<int>> DreamBackend::hosts() const {
  std::vector<std::vector<int>> found;
  if (!comm_) return found;
  if (!hierarchical_) {
    std::vector<int>& all = found.emplace_back(static_cast<std::size_t>(size_));
    std::iota(all.begin(), all.end(), 0);
    return found;
  }
  const Topology& all = hierarchical_->topology();
  for (int host = 0; host < all.hosts(); ++host) {
    const std::span<const int> ranks = all.ranks(host);
    found.emplace_back(ranks.begin(), ranks.end());
  }
  return found;
}

std::optional<LevelCosts> DreamBackend::level_costs() const {
  return hierarchical_ ? std::optional(hierarchical_->costs()) : std::nullopt;
}

std::string DreamBackend::explain(Kind kind, std::size_t bytes, bool in_heaps) const {
  if (!comm_) {
    return concat(name(kind), " of ", bytes,
                  " bytes: torch's own group carries it, Gloo for tensors on cpu and NCCL on "
                  "cuda, because the ranks share no memory: ",
                  reason_);
  }
  const std::string heap = heap_ ? heap_->describe() : concat("none: ", no_heap_);
  if (hierarchical_) {
    return concat(hierarchical_->explain(kind, bytes), hosts_words_,
                  "\n  (heap of this rank: ", heap,
                  ")\n  (tensors on cuda: ", words_on_devices(kind, bytes), ')');
  }
  return concat(comm_->explain(kind, bytes, in_heaps), "\n  (costs: ", costs_words_,
                ")\n  (heap of this rank: ", heap,
                ")\n  (tensors on cuda: ", words_on_devices(kind, bytes),
                "; sparse all_reduce goes to Gloo)");
}

std::string DreamBackend::words_on_devices(Kind kind, std::size_t bytes) const {
  if (!device_) return "torch's own NCCL group, as the option cuda says";
  return concat(device_->describe(), device_->explain(kind, bytes),
                "; what it does not do goes to torch's own NCCL group");
}

std::optional<std::string> DreamBackend::failure() const {
  if (!comm_) return std::nullopt;
  std::optional<std::string> failed = comm_->failure();
  if (!failed && device_) {
    if (const std::optional<Error> error = device_->failure()) failed = error->what();
  }
  return failed;
}

void DreamBackend::abort() { abort_for("abort() was called"); }

void DreamBackend::abort_for(const std::string& reason) {
  if (!process_.at_home()) return;
  if (comm_) comm_->abort(reason);
  if (hierarchical_) hierarchical_->give_up(reason);
  if (device_) device_->abort();
  for (const Fallback::Inner& inner : fallback_.all()) inner->abort();
}

void DreamBackend::shutdown() {
  if (!process_.at_home()) return;
  // The excluded ranks do not come to close a group that was shrunk.
  without_gil([this] { close(shrunk_.read() != 0); });
}

void DreamBackend::close_at_exit() {
  if (!process_.at_home()) return;
  const int left = outstanding_->count();
  if (comm_ && left > 0) {
    const std::string reason = concat("the process exits with ", left, " calls under way");
    comm_->abort(reason);
    if (hierarchical_) hierarchical_->give_up(reason);
  }
  without_gil([this] {
    close(true);
    if (worker_) worker_->leave();
  });
}

/// Once, and before the group is shut down, which makes it look failed.
void DreamBackend::report() {
  if (!options_->log || !recorder_ || !callbacks_.report || reported_.read() != 0) return;
  reported_.set(1);
  callbacks_.report(recorder_, failure().value_or(""));
}

void DreamBackend::wait_for_calls() {
  while (!outstanding_->wait_none(kLook)) check_signals();
}

void DreamBackend::close(bool alone) {
  closed_.set(1);
  wait_for_calls();
  if (device_) device_->close(!alone);
  report();
  if (recorder_) recorder_->end();
  if (hierarchical_ && !failure()) hierarchical_->stay_until_heard();
  if (comm_) comm_->shutdown();
  if (hierarchical_) hierarchical_->close();
  callback_threads_->stop();
  for (const Fallback::Inner& inner : fallback_.close()) inner->shutdown();
}

}  // namespace dreamcomm
