// Makes groups: for torch, split from another, or merged of two.
#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/backend/backend.h"
#include "c10d/base/convert.h"
#include "c10d/base/gil_signals.h"
#include "c10d/device/bootstrap_exchange.h"
#include "c10d/device/device_group.h"
#include "c10d/process/process_heap.h"
#include "c10d/process/process_recorders.h"
#include "c10d/rendezvous/gloo_link.h"
#include "c10d/rendezvous/liveness.h"
#include "c10d/rendezvous/multinode_group.h"
#include "c10d/rendezvous/node_connector.h"
#include "c10d/rendezvous/rendezvous.h"
#include "c10d/rendezvous/store_board.h"
#include "c10d/rendezvous/store_worker.h"
#include "c10d/rendezvous/torch_store.h"
#include "comm/communicator.h"
#include "comm/rank_state.h"
#include "comm/tuning/costs_file.h"
#include "internode/hier_communicator.h"

namespace dreamcomm {
namespace {

/// Operations that a log keeps for a post-mortem, as torch's flight recorder does.
constexpr std::size_t kRecords = 2000;

/// The group's name in errors; "" for the default group, whose name they leave out.
std::string group_in_errors(const DreamOptions& options) {
  if (options.group_name == kDefaultGroup) return "";
  return describe_group(options.group_name, members_of(options));
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

/// Counts in `depth` the signal handlers that run now: a call made by one would wait for the call
/// it interrupted. Only the main thread counts: no other runs them.
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
      fallback_(
          [store = visit_, rank, size, options, make = host.make_inner](const std::string& device) {
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
    if (!result.no_heap.empty()) drop_heap(result.no_heap);
    if (result.topology.hosts() > 1) {
      share_between_nodes(result, shm);
    } else if (result.fabric) {
      share_within_host(std::move(result.fabric));
    } else {
      heap_.reset();         // Gloo copies from there as from any memory
      fallback_.get("cpu");  // now, as ranks that exchange messages must not wait for all others
    }
  } catch (const Error& error) {
    post_why_not_made(error.what());
    std::rethrow_exception(current_as_torch());
  } catch (...) {
    post_why_not_made("it was interrupted, or failed otherwise, while the group was made");
    std::rethrow_exception(current_as_torch());
  }
}

/// Posts the reason for the other ranks, once: they would wait for this one, also after Ctrl-C.
/// Also before this rank knows that there are several nodes: others may know, and read only there.
void DreamBackend::post_why_not_made(const std::string& reason) {
  if (!worker_) return;
  const AbortReasons reasons = reasons_through(worker_);
  if (reasons.of(rank_, std::chrono::milliseconds(0)).empty()) reasons.post_abort(rank_, reason);
}

void DreamBackend::drop_heap(const std::string& reason) {
  heap_.reset();
  no_heap_ = reason;
}

std::shared_ptr<Communicator> DreamBackend::make_communicator(std::unique_ptr<Fabric> fabric,
                                                              const CommOptions& options,
                                                              const Connection* between_nodes) {
  auto host = std::make_shared<Communicator>(std::move(fabric), options);
  cpu_ = host;  // stays in the group until an error of the set-up is posted
  recorder_ = host->recorder();
  if (between_nodes) {
    recorder_ = recorder_of_hosts(recorder_, between_nodes->place, members_of(*options_));
  }
  if (options_->log) recorder_->open_log(kRecords);
  ProcessRecorders::of_process().add(recorder_);
  tune(*host, between_nodes ? std::optional(between_nodes->end()) : std::nullopt);
  return host;
}

void DreamBackend::share_within_host(std::unique_ptr<Fabric> fabric) {
  const auto host = make_communicator(
      std::move(fabric),
      {options_->group_name, options_->algorithm, options_->fixed_order, options_->timeout,
       callbacks_.call_site, callbacks_.warn, members_of(*options_)},
      nullptr);
  const auto job = c10::make_intrusive<c10d::PrefixStore>("job", visit_);
  liveness_ = std::make_shared<Liveness>(host, std::make_shared<StoreWorker>(job));
  if (is_default(*options_)) set_liveness(liveness_);
  serve_devices(host, std::nullopt);
}

void DreamBackend::share_between_nodes(const ShmResult& whole, const ShmOptions& shm) {
  const Topology& topology = whole.topology;
  const NodeConnector nodes({rank_, size_, options_, callbacks_, visit_, interrupt_}, topology,
                            worker_);
  const Connection calls = nodes.begin("calls");
  ShmResult here = nodes.connect_this_host(calls, shm, whole);
  if (!here.no_heap.empty()) drop_heap(here.no_heap);
  const auto host = make_communicator(
      std::move(here.fabric),
      {options_->group_name, options_->algorithm, options_->fixed_order, options_->timeout,
       callbacks_.call_site, callbacks_.warn, members_on_host(members_of(*options_), calls.place),
       members_of(*options_)},
      &calls);
  setup_words_ = map_of_hosts(topology, whole.apart);
  auto link = std::make_unique<GlooLink>(nodes.connect(calls, host, store_between(visit_)), rank_);
  liveness_ = std::make_shared<Liveness>(host, topology, rank_, worker_);
  std::shared_ptr<HierarchicalCommunicator> all;
  nodes.first_use(calls, host, kMet, [&] {
    all = std::make_shared<HierarchicalCommunicator>(
        host, topology, rank_, std::move(link),
        HierarchicalOptions{
            .group = group_in_errors(*options_),
            .call_site = callbacks_.call_site,
            .heap = heap_,
            .recorder = recorder_,
            .widens_halves = widens_halves(),
            .reasons = reasons_through(worker_),
            .board = leaders_board(worker_, topology, rank_, [host] { host->ring(); })});
  });
  cpu_ = all;
  const auto deadline = [this] { return deadline_in(Clock::now(), rendezvous_timeout(*options_)); };
  if (options_->costs != "fixed") {
    nodes.first_use(calls, host, kMeasured, [&] { all->tune(deadline(), interrupt_); });
  }
  level_costs_ = all->costs();
  if (is_default(*options_)) set_liveness(liveness_);
  serve_devices(host, device_nodes(*all));
  const Connection messages = nodes.begin("messages");
  const Fallback::Inner gloo = nodes.connect(messages, host, visit_);
  fallback_.set("cpu", gloo);
  nodes.first_use(messages, host, kMet, [&] {
    all->carry_messages(std::make_unique<GlooLink>(gloo, rank_));
    all->sync(deadline(), interrupt_);
  });
}

bool DreamBackend::widens_halves() const { return options_->internode_dtype != "16bit"; }

DeviceNodes DreamBackend::device_nodes(HierarchicalCommunicator& all) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>("between-devices", visit_);
  return {{all.topology(), rank_, widens_halves(), options_->device.chunk},
          exchange_among_all(all, longest_rendezvous(), interrupt_),
          [this, store] { return callbacks_.make_inner(store, rank_, size_, options_, "cuda"); }};
}

LongestWait DreamBackend::longest_rendezvous() const {
  return [this] { return rendezvous_timeout(timeout()); };
}

void DreamBackend::serve_devices(const std::shared_ptr<Communicator>& host,
                                 std::optional<DeviceNodes> nodes) {
  if (options_->cuda != "dreamcomm") return;
  DeviceKind kind = options_->device;
  kind.options.heap_bytes = options_->cuda_heap_bytes;
  kind.options.asked = gpu::row_asked(options_->algorithm, options_->fixed_order);
  devices_ =
      std::make_unique<DeviceGroup>(host, kind, interrupt_, longest_rendezvous(), std::move(nodes));
}

void DreamBackend::tune(Communicator& host, std::optional<Clock::time_point> deadline) {
  const auto chosen_by = [this](const std::string& costs) {
    setup_words_ = concat("\n  (costs: ", costs, ')');
  };
  chosen_by("fixed ones, as the option costs says");
  const int size = host.size();
  const bool first = host.rank() == 0;
  if (options_->costs == "fixed" || size == 1) return;
  const bool measures = options_->costs == "auto";
  const std::string path =
      measures ? costs_path(size, options_->page_bytes, host.all_have_heaps()) : options_->costs;
  const auto known = first ? load_costs(path) : std::nullopt;
  bool complete = false;
  while_made(*options_, rank_, size_, kMeasured,
             [&] { complete = host.tune(known, heap_.get(), interrupt_, deadline); });
  chosen_by(concat("those of rank 0's ", path.empty() ? "measuring" : path));
  if (!first || known) return;
  if (!measures || !complete || !save_costs(path, host.costs())) {
    chosen_by(concat("measured for this group; they could not be kept in ",
                     path.empty() ? "a file, as HOME is not set" : path));
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
    if (globals.empty() && !is_whole) continue;  // a merged group's ranks have no numbers in torch
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
