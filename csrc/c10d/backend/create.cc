// How a group comes to be: made by torch, split from another, or merged of two.
#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/backend/backend.h"
#include "c10d/base/convert.h"
#include "c10d/base/gil_signals.h"
#include "c10d/device/bootstrap_exchange.h"
#include "c10d/process/process_heap.h"
#include "c10d/process/process_recorders.h"
#include "c10d/rendezvous/gloo_link.h"
#include "c10d/rendezvous/liveness.h"
#include "c10d/rendezvous/multinode_group.h"
#include "c10d/rendezvous/rendezvous.h"
#include "c10d/rendezvous/store_board.h"
#include "c10d/rendezvous/store_worker.h"
#include "c10d/rendezvous/torch_store.h"
#include "comm/rank_state.h"
#include "comm/tuning/costs_file.h"

namespace dreamcomm {
namespace {

/// Operations that a log keeps for a post-mortem, as torch's BatchedTransfer Recorder does.
constexpr std::size_t kRecords = 2000;

/// As errors name the group, which of the default one they need not.
std::string group_to_tell(const DreamOptions& options) {
  if (options.group_name == kDefaultGroup) return "";
  return words_on_group(options.group_name, members_of(options));
}

/// torch reuses a store when a group is destroyed and made anew, and then the
/// addresses of the old group are still in it. So a rank counts its visits, and
/// every visit has keys of its own. All ranks of a group have visited equally often,
/// if only groups of its size count: a shrunken default group hands out old names again.
StorePtr visit(const StorePtr& store, int rank, int size) {
  const auto number = store->add(concat("dreamcomm/visits/", size, '/', rank), 1);
  return c10::make_intrusive<c10d::PrefixStore>(concat("dreamcomm/visit/", size, '/', number),
                                                store);
}

StorePtr store_between(const StorePtr& visit) {
  return c10::make_intrusive<c10d::PrefixStore>("between", visit);
}

/// Handlers of signals run in the midst of a call, which their own calls would wait for. Only the
/// main thread counts: no other runs them.
void handle_signals(Gauge& depth) {
  if (!on_main_thread()) return;
  struct Within {
    explicit Within(Gauge& held) : depth(held) { depth.add(1); }
    ~Within() { depth.add(-1); }
    Within(const Within&) = delete;
    Within& operator=(const Within&) = delete;
    Gauge& depth;
  };
  const Within within(depth);
  check_signals();
}

/// What fails while a group is made is no call of the program: `does` says what its ranks did then.
template <typename Do>
void while_made(const std::string& group, int rank, int size, const char* does, Do&& run) {
  try {
    run();
  } catch (const Error& error) {
    throw Error(error.kind(), concat("setting up ", group, " on rank ", rank, " of ", size, does,
                                     ": ", error.what()));
  }
}
constexpr const char* kMeasured = ", whose costs were being measured";
constexpr const char* kMet = ", whose ranks were meeting";

}  // namespace

c10::intrusive_ptr<DreamBackend> DreamBackend::create(
    const StorePtr& store, int rank, int size, const c10::intrusive_ptr<DreamOptions>& options,
    const PythonCallbacks& host, const Watch& watch) {
  options->timeout = bounded(options->timeout);
  require_valid(*options);
  auto backend = c10::make_intrusive<DreamBackend>(store, rank, size, options, host, watch);
  backend->exit_hook_ = host.register_exit(backend);
  return backend;
}

DreamBackend::DreamBackend(const StorePtr& store, int rank, int size,
                           const c10::intrusive_ptr<DreamOptions>& options,
                           const PythonCallbacks& host, const Watch& watch)
    : Backend(rank, size),
      store_(store),
      visit_(visit(store, rank, size)),
      options_(options),
      callbacks_(host),
      interrupt_([this] { handle_signals(handling_); }),
      fallback_([this, store = visit_, rank, size, options,
                 make = host.make_inner](const std::string& device) {
        if (hierarchical_ && device == "cpu") {
          return between_hosts(connection(hierarchical_->topology(), "messages"), store);
        }
        return make(store, rank, size, options, device);
      }),
      last_child_(c10::intrusive_ptr<c10d::Backend>()) {
  timeout_ms_.set(options->timeout.count());
  std::string heap_refused;
  if (options->shared_memory && options->heap_bytes > 0) {
    try {
      heap_ = process_heap(options->heap_bytes);
    } catch (const Error& error) {  // little address space: collectives stage, then
      no_heap_ = heap_refused = error.what();
    }
  }
  ShmOptions shm = rendezvous_options(*options, size, host, heap_, heap_refused);
  if (watch) shm.will_not_come = watch;
  shm.on_hosts = [this] {
    worker_ = std::make_shared<StoreWorker>(store_between(visit_));
    worker_->greet();
  };
  TorchStore meeting(c10::make_intrusive<c10d::PrefixStore>("shm", visit_));
  try {
    ShmResult result = meet(meeting, rank, size, shm, *options);
    reason_ = std::move(result.reason);
    if (result.topology.hosts() > 1) hosts_words_ = map_of_hosts(result.topology, result.apart);
    if (!result.no_heap.empty()) {
      heap_.reset();
      no_heap_ = std::move(result.no_heap);
    }
    if (result.topology.hosts() > 1) span(result, shm);
    if (result.fabric) {
      use(std::move(result.fabric),
          {options->group_name, options->algorithm, options->fixed_order, options->timeout,
           host.call_site, host.warn, members_of(*options)},
          nullptr);
      const auto job = c10::make_intrusive<c10d::PrefixStore>("job", visit_);
      liveness_ = std::make_shared<Liveness>(comm_, std::make_shared<StoreWorker>(job));
    }
    if (!comm_) heap_.reset();  // Gloo copies from there as from any memory
    if (is_default(*options) && liveness_) set_liveness(liveness_);
    if (comm_ && options->cuda == "dreamcomm") serve_devices();
    // Collective, as far as Gloo is: two ranks that exchange messages must not wait for the others.
    if (!comm_) fallback_.get("cpu");
    if (hierarchical_) {
      const Connection messages = connection(hierarchical_->topology(), "messages");
      auto link = std::make_unique<GlooLink>(fallback_.get("cpu"), rank_);
      use_first(messages, kMet, [&] {
        hierarchical_->carry_messages(std::move(link));
        hierarchical_->meet(deadline_in(Clock::now(), rendezvous_timeout(*options)), interrupt_);
      });
    }
  } catch (const Error& error) {
    tell_why_not_made(error.what());
    std::rethrow_exception(current_as_torch());
  } catch (...) {
    tell_why_not_made("it was interrupted, or failed otherwise, while the group was made");
    std::rethrow_exception(current_as_torch());
  }
}

/// The other ranks, unless they have been told: by Ctrl-C, too, they would wait for it. Also before
/// this one knows that there are several hosts: they may know already, and look nowhere else.
void DreamBackend::tell_why_not_made(const std::string& reason) {
  if (!worker_) return;
  const AbortReasons reasons = reasons_through(worker_);
  if (reasons.of(rank_, std::chrono::milliseconds(0)).empty()) reasons.give_up(rank_, reason);
}

void DreamBackend::use(std::unique_ptr<Fabric> fabric, const CommOptions& options,
                       const Connection* all) {
  comm_ = std::make_shared<Communicator>(std::move(fabric), options);
  recorder_ = comm_->recorder();
  if (all) recorder_ = recorder_of_hosts(recorder_, all->place, members_of(*options_));
  if (options_->log) recorder_->open_log(kRecords);
  ProcessRecorders::of_process().add(recorder_);
  tune(all ? std::optional(all->end()) : std::nullopt);
}

void DreamBackend::make_part(const Connection& all, const ShmOptions& options,
                             const ShmResult& whole) {
  ShmOptions in_time = options;
  in_time.timeout = all.time;
  in_time.will_not_come =
      watch_on_mates(all, options.will_not_come, whole, reasons_through(worker_));
  ShmResult here = connect_host(visit_, all.place, in_time, whole);
  if (!here.no_heap.empty()) {
    heap_.reset();
    no_heap_ = std::move(here.no_heap);
  }
  use(std::move(here.fabric),
      {options_->group_name, options_->algorithm, options_->fixed_order, options_->timeout,
       callbacks_.call_site, callbacks_.warn, members_on_host(members_of(*options_), all.place),
       members_of(*options_)},
      &all);
}

void DreamBackend::span(const ShmResult& whole, const ShmOptions& options) {
  const Topology& topology = whole.topology;
  const Connection calls = connection(topology, "calls");
  make_part(calls, options, whole);
  auto link = std::make_unique<GlooLink>(between_hosts(calls, store_between(visit_)), rank_);
  liveness_ = std::make_shared<Liveness>(comm_, topology, rank_, worker_);
  use_first(calls, kMet, [&] {
    hierarchical_ = std::make_unique<HierarchicalCommunicator>(
        *comm_, topology, rank_, std::move(link),
        HierarchicalOptions{
            .group = group_to_tell(*options_),
            .call_site = callbacks_.call_site,
            .heap = heap_,
            .recorder = recorder_,
            .widens_halves = options_->internode_dtype != "16bit",
            .reasons = reasons_through(worker_),
            .board = leaders_board(worker_, topology, rank_, [this] { comm_->ring(); })});
  });
  if (options_->costs == "fixed") return;
  use_first(calls, kMeasured, [&] {
    hierarchical_->tune(deadline_in(Clock::now(), rendezvous_timeout(*options_)), interrupt_);
  });
}

void DreamBackend::use_first(const Connection& connection, const char* does,
                             const std::function<void()>& use) {
  while_made(group_being_made(*options_), rank_, size_, does, [&] {
    first_use(connection, *worker_, reasons_through(worker_), watch_on(connection, comm_, worker_),
              use);
  });
}

Connection DreamBackend::connection(const Topology& topology, const std::string& carries) const {
  return {{topology, rank_}, carries, time_to_connect(*options_), interrupt_};
}

Fallback::Inner DreamBackend::between_hosts(const Connection& made, const StorePtr& store) {
  const DeadlineStore::Watch watch = watch_on(made, comm_, worker_);
  return connect_hosts(made, *worker_, reasons_through(worker_), [&] {
    return gloo_between_hosts(made, c10::make_intrusive<DeadlineStore>(store, made.end(), watch));
  });
}

/// Torch names nobody whom it could not reach; what is known of others says more.
Fallback::Inner DreamBackend::gloo_between_hosts(const Connection& made,
                                                 const c10::intrusive_ptr<DeadlineStore>& store) {
  try {
    return callbacks_.make_inner(store, rank_, size_, options_, "hosts");
  } catch (const std::exception& error) {
    if (is_foreign(error)) throw;
    const auto watch = [&] { return store->trouble(); };
    const std::string known = made.is_nearly_over() ? watch() : cause_soon(watch);
    const std::string own = words_of_gloo(error.what());
    const bool is_all = !known.empty() && own.find(known) != std::string::npos;
    throw Error(
        ErrorKind::kPeerLost,
        concat("rank ", rank_, " of ", size_, " in group '", options_->group_name,
               "' could not connect with the ranks of other hosts: ", is_all ? "" : own + "; ",
               known.empty() ? "a rank there may have ended or not been reached" : known));
  }
}

void DreamBackend::serve_devices() {
  DeviceKind kind = options_->device;
  kind.options.heap_bytes = options_->cuda_heap_bytes;
  kind.options.asked = gpu::row_asked(options_->algorithm, options_->fixed_order);
  const LongestWait longest = [this] { return rendezvous_timeout(timeout()); };
  std::optional<DeviceHosts> hosts;
  if (hierarchical_) {
    const auto store = c10::make_intrusive<c10d::PrefixStore>("between-devices", visit_);
    hosts = {
        {hierarchical_->topology(), rank_, options_->internode_dtype != "16bit", kind.chunk},
        exchange_among_hosts(*comm_, *hierarchical_, longest, interrupt_),
        [this, store] { return callbacks_.make_inner(store, rank_, size_, options_, "cuda"); }};
  }
  device_ = std::make_unique<DeviceGroup>(comm_, kind, interrupt_, longest, std::move(hosts));
}

void DreamBackend::tune(std::optional<Clock::time_point> deadline) {
  costs_words_ = "fixed ones, as the option costs says";
  const int size = comm_->size();
  const bool first = comm_->rank() == 0;
  if (options_->costs == "fixed" || size == 1) return;
  const bool measures = options_->costs == "auto";
  const std::string path =
      measures ? costs_path(size, options_->page_bytes, comm_->all_have_heaps()) : options_->costs;
  const auto known = first ? load_costs(path) : std::nullopt;
  bool complete = false;
  while_made(group_being_made(*options_), rank_, size_, kMeasured,
             [&] { complete = comm_->tune(known, heap_.get(), interrupt_, deadline); });
  costs_words_ = concat("those of rank 0's ", path.empty() ? "measuring" : path);
  if (!first || known) return;
  if (!measures || !complete || !save_costs(path, comm_->costs())) {
    costs_words_ = concat("measured for this group; they could not be kept in ",
                          path.empty() ? "a file, as HOME is not set" : path);
  }
}

c10::intrusive_ptr<DreamBackend> DreamBackend::child(
    const StorePtr& store, int rank, int size, const c10::intrusive_ptr<DreamOptions>& options) {
  const std::scoped_lock lock(child_mutex_);
  // torch asks once per device type, with one store: the answer is one backend.
  auto last = c10::dynamic_intrusive_pointer_cast<DreamBackend>(last_child_.lock());
  if (last && last->store_.get() == store.get()) return last;
  auto made = create(store, rank, size, options, callbacks_);
  last_child_ = c10::weak_intrusive_ptr<c10d::Backend>(made);
  return made;
}

c10::intrusive_ptr<c10d::Backend> DreamBackend::split(
    const StorePtr& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  if (own == ranks.end()) return nullptr;
  auto options = own_options(opts);
  const std::vector<uint64_t>& globals = options_->global_ranks_in_group;
  options->global_ranks_in_group.clear();
  const bool is_whole = is_default(*options_);
  for (const int rank : ranks) {
    const auto index = static_cast<std::size_t>(rank);
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "split: expected ranks of the group, 0 to ",
                      size_ - 1, ", got ", rank);
    if (globals.empty() && !is_whole) continue;  // of a merged group: torch numbers none of them
    options->global_ranks_in_group.push_back(globals.empty() ? index : globals.at(index));
  }
  return child(store, static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()),
               options);
}

c10::intrusive_ptr<c10d::Backend> DreamBackend::merge(
    const StorePtr& store, const c10::intrusive_ptr<c10d::Backend::Options>& opts, const int& rank,
    const int& size) {
  auto options = own_options(opts);
  options->global_ranks_in_group.clear();
  if (options->group_name == kDefaultGroup) options->group_name = "merged";
  return child(store, rank, size, options);
}

}  // namespace dreamcomm
