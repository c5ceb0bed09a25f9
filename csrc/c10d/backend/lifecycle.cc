// Queries about a group, and its end.
#include <ATen/ops/empty.h>

#include <utility>

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
    // A forked child has the group's memory but not its threads. It leaks both, as ending them
    // would end the parent's group.
    new auto(std::exchange(devices_, std::make_unique<NoDevices>()));
    new auto(std::move(cpu_));
    new auto(std::move(liveness_));
    new auto(std::move(worker_));
    new auto(std::move(callback_threads_));
    new auto(fallback_.close());
    new auto(std::move(closing_));
    return;
  }
  without_gil([this] {
    try {
      close(true);
    } catch (const std::exception& error) {
      TORCH_WARN("dreamcomm: closing a group failed: ", error.what());
    }
    devices_ = std::make_unique<NoDevices>();  // first: its kernels' group uses the others
    cpu_.reset();
    liveness_.reset();
    worker_.reset();
    heap_.reset();
    exit_hook_.reset();
    callbacks_ = {};
    visit_.reset();
    store_.reset();
  });
}

c10::intrusive_ptr<c10d::Backend::Options> DreamBackend::getBackendOptions() { return options_; }

Communicator& DreamBackend::single_host(const char* what) const {
  try {
    return cpu_->single_host(what);
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
}

bool DreamBackend::shares_heaps() const {
  return cpu_ && heap_ && cpu_->hosts().size() == 1 &&
         single_host("tensors of a sharded pass lie in memory").all_have_heaps();
}

void DreamBackend::setTimeout(milliseconds given) {
  const milliseconds timeout = bounded(given);
  TORCH_CHECK_VALUE(timeout.count() > 0, "rank ", rank_, ": expected a positive timeout, got ",
                    timeout.count(), " ms");
  timeout_ms_.set(timeout.count());
  options_->timeout = timeout;
  for (const Fallback::Inner& inner : fallback_.all()) set_timeout_of(*inner, timeout);
  devices_->set_timeout(timeout);
}

uint64_t DreamBackend::getSequenceNumberForGroup() {
  return static_cast<uint64_t>(sequence_.read());
}

c10d::ErrorType DreamBackend::getError() {
  if (!cpu_) return fallback_.get("cpu")->getError();
  std::optional<ErrorKind> kind = cpu_->failure_kind();
  if (!kind) {
    if (const std::optional<Error> failed = devices_->failure()) kind = failed->kind();
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
  return on_cpu || devices_->allocates();
}

at::Tensor DreamBackend::allocateTensor(long size, at::TensorOptions options) {
  const bool on_device = devices_->handles(options.device());
  TORCH_CHECK_VALUE(options.device().is_cpu() || on_device, "rank ", rank_,
                    ": dreamcomm allocates tensors on cpu, and on cuda with its option cuda, got ",
                    options.device());
  TORCH_CHECK_VALUE(size >= 0, "rank ", rank_, ": expected a size from 0 on, got ", size);
  require_open();
  if (on_device) return devices_->allocate(size, options);
  return heap_ ? allocate_tensor(*heap_, size, options) : at::empty({size}, options);
}

bool DreamBackend::holds(const Tensor& tensor) const { return devices_->holds(tensor); }

std::array<Traffic, kKinds> DreamBackend::traffic() const {
  require_home();  // the counters lie in memory that children do not have
  return cpu_ ? cpu_->traffic() : std::array<Traffic, kKinds>{};
}

std::optional<std::array<WireTraffic, kKinds>> DreamBackend::traffic_between() const {
  std::optional<std::array<WireTraffic, kKinds>> all = cpu_ ? cpu_->wire_traffic() : std::nullopt;
  if (!all) return all;
  const std::array<WireTraffic, kKinds> on_devices = devices_->traffic();
  for (std::size_t i = 0; i < all->size(); ++i) {
    (*all)[i].sent += on_devices[i].sent;
    (*all)[i].received += on_devices[i].received;
  }
  return all;
}

std::string DreamBackend::transport() const {
  return cpu_ ? cpu_->describe() : concat("gloo, as no memory is shared: ", reason_);
}

bool DreamBackend::has_ended(int rank) const {
  require_rank(Site{"has_ended", rank_, size_}, "rank", rank);
  return cpu_ && cpu_->has_ended(rank);
}

std::vector<std::vector<int>> DreamBackend::hosts() const {
  return cpu_ ? cpu_->hosts() : std::vector<std::vector<int>>();
}

std::string DreamBackend::explain(Kind kind, std::size_t bytes, bool in_heaps) const {
  if (!cpu_) {
    return concat(name(kind), " of ", bytes,
                  " bytes: torch's own group carries it, Gloo for tensors on cpu and NCCL on "
                  "cuda, because the ranks share no memory: ",
                  reason_);
  }
  const std::string heap = heap_ ? heap_->describe() : concat("none: ", no_heap_);
  return concat(cpu_->explain(kind, bytes, in_heaps), setup_words_,
                "\n  (heap of this rank: ", heap,
                ")\n  (tensors on cuda: ", devices_->explain(kind, bytes),
                "; sparse all_reduce goes to Gloo)");
}

std::optional<std::string> DreamBackend::failure() const {
  if (!cpu_) return std::nullopt;
  std::optional<std::string> failed = cpu_->failure();
  if (!failed) {
    if (const std::optional<Error> error = devices_->failure()) failed = error->what();
  }
  return failed;
}

void DreamBackend::abort() { abort_for("abort() was called"); }

void DreamBackend::abort_for(const std::string& reason) {
  if (!process_.at_home()) return;
  if (cpu_) cpu_->abort(reason);
  devices_->abort();
  for (const Fallback::Inner& inner : fallback_.all()) inner->abort();
}

void DreamBackend::shutdown() {
  if (!process_.at_home()) return;
  // A shrunk group is closed alone: the excluded ranks take no part.
  without_gil([this] { close(shrunk_.read() != 0); });
}

void DreamBackend::close_at_exit() {
  if (!process_.at_home()) return;
  const int left = outstanding_->count();
  if (cpu_ && left > 0) {
    cpu_->abort(concat("the process exits with ", left, " calls under way"));
  }
  without_gil([this] {
    close(true);
    if (worker_) worker_->leave();
  });
}

/// Reports once, before the shutdown, after which the group looks failed.
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
  devices_->close(!alone);
  report();
  if (recorder_) recorder_->end();
  if (cpu_) {
    if (!failure()) cpu_->wait_for_readers();
    cpu_->shutdown();
  }
  callback_threads_->stop();
  for (const Fallback::Inner& inner : fallback_.close()) inner->shutdown();
  if (closing_.joinable()) closing_.join();
}

}  // namespace dreamcomm
