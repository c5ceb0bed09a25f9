// The c10d backend: checks a call, makes a Request of it and runs that on the group's communicator
// for CPU tensors or for a device's, or on torch's own backend where these do not serve it.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "c10d/base/call_blocks.h"
#include "c10d/base/check_args.h"
#include "c10d/base/convert.h"
#include "c10d/base/options.h"
#include "c10d/base/python_callbacks.h"
#include "c10d/base/torch_fallback.h"
#include "c10d/device/bootstrap_exchange.h"
#include "c10d/device/device_communicator.h"
#include "c10d/device/multinode_setup.h"
#include "c10d/messages/message_carrier.h"
#include "c10d/messages/placed_message.h"
#include "c10d/process/fork_guard.h"
#include "c10d/rendezvous/connect_nodes.h"
#include "c10d/rendezvous/deadline_store.h"
#include "c10d/rendezvous/multinode_group.h"
#include "c10d/rendezvous/torch_store.h"
#include "c10d/work/callback_threads.h"
#include "c10d/work/outstanding.h"
#include "c10d/work/work.h"
#include "comm/group_communicator.h"
#include "comm/record/recorder.h"
#include "core/flag.h"
#include "internode/cost/model.h"
#include "transport/shm/heap.h"

namespace dreamcomm {

/// explain() for a group of `size` ranks that does not exist: with the costs that an
/// earlier group of this machine has saved, or with the fixed ones.
std::string explain_world(Kind kind, std::size_t bytes, int size, bool in_heaps);

class Communicator;              // comm/communicator.h: one host's group
class Fabric;                    // transport/fabric.h: the windows of all ranks
class HierarchicalCommunicator;  // internode/hier_communicator.h: a group on several nodes
class Liveness;                  // c10d/rendezvous/liveness.h: the ranks that have ended
struct CommOptions;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class DreamBackend final : public c10d::Backend, public MessageCarrier {
 public:
  using Tensor = at::Tensor;
  using TensorList = std::vector<at::Tensor>;

  /// Why a rank of the new group will not take part, or "".
  using Watch = std::function<std::string(int rank)>;
  /// Collective: all ranks of the group make theirs. Throws what torch expects. `watch`: by default
  /// what the job's default group knows (Liveness).
  static c10::intrusive_ptr<DreamBackend> create(const StorePtr& store, int rank, int size,
                                                 const c10::intrusive_ptr<DreamOptions>& options,
                                                 const PythonCallbacks& host,
                                                 const Watch& watch = {});
  DreamBackend(const StorePtr& store, int rank, int size,
               const c10::intrusive_ptr<DreamOptions>& options, const PythonCallbacks& host,
               const Watch& watch);
  ~DreamBackend() override;

  // The group (create.cc, lifecycle.cc).
  const std::string getBackendName() const override { return kBackendName; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const StorePtr& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(const StorePtr& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                          const int& rank, const int& size) override;
  bool supportsShrinking() const override { return true; }
  /// Collective among the ranks that stay (shrink.cc).
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) override;
  virtual void setTimeout(std::chrono::milliseconds timeout);  // 2.11 lacks it in the base
  void setSequenceNumberForGroup() override {}                 // all ranks begin at 0
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void enableCollectivesTiming() override {}  // as Gloo: there is nothing to turn on
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  /// Ends a batch that an exception escapes: its receives are cancelled; its sends still complete.
  /// Does nothing if there is none.
  void cancel_coalescing();
  void abort() override;
  void shutdown() override;
  bool supportsTensorAlloc(c10::DeviceIndex index) override;
  Tensor allocateTensor(long size, at::TensorOptions options = {}) override;

  // Collectives (collectives.cc).
  WorkPtr broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(TensorList& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(TensorList& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr gather(std::vector<TensorList>& outputs, TensorList& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(TensorList& outputs, TensorList& inputs,
                   const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // All-gather and reduce-scatter in their many forms (gather_scatter.cc). The
  // names are the old ones: torch 2.13 and later call the new ones, which forward.
  WorkPtr allgather(std::vector<TensorList>& outputs, TensorList& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(Tensor& output, Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<TensorList>& outputs, TensorList& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr reduce_scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;

  /// Runs a collective on memory that the caller keeps, on this thread, until the group's timeout.
  /// Only where shares_memory(). (arrays.cc)
  void run_blocks(Request request);
  /// A collective on arrays, as tensors on their memory. Sizes are those of the blocks, in bytes;
  /// none: one block of all.
  struct ArrayCall {
    Kind kind = Kind::kBarrier;
    std::optional<c10d::ReduceOp> op;
    int root = 0;
    std::optional<Tensor> input;
    std::vector<std::size_t> in_sizes;
    int copies = 1;  // of the input's one block, as all_to_all sends it to all
    std::optional<Tensor> output;
    std::vector<std::size_t> out_sizes;
    std::uint32_t digest = 0;  // as Request::digest
    bool async = false;
  };
  /// Runs it. Only where shares_memory(). (arrays.cc)
  WorkPtr run_arrays(const ArrayCall& asked);
  /// All-reduces tensors in place, or without `op` broadcasts them from `root`, as one call. Ranks
  /// whose digests differ do not match. Only where shares_memory(). (arrays.cc)
  WorkPtr run_together(const TensorList& tensors, const std::optional<c10d::ReduceOp>& op, int root,
                       std::uint32_t digest, bool async);
  /// Tells the ranks that this one does not make the next collective, and why: it fails on them as
  /// a mismatch. Returns at once. Does nothing where torch's own backends carry everything.
  void refuse(const std::string& why);

  /// One pass of a sharded optimizer over CPU tensors in the process's heap, which it keeps alive.
  /// `op`: how it averages what it reads. Only where shares_heaps(). (gather_scatter.cc)
  WorkPtr sharded_pass(std::shared_ptr<ShardedPass> pass, const TensorList& tensors,
                       const c10d::ReduceOp& op, bool async);
  /// True if all ranks are processes of this host, and share its memory.
  bool is_on_one_host() const { return cpu_ && cpu_->hosts().size() == 1; }
  /// True if all ranks map each other's heaps: the same answer on all.
  bool shares_heaps() const;

  // Messages (send_recv.cc).
  WorkPtr send(TensorList& tensors, int dst, int tag) override;
  WorkPtr recv(TensorList& tensors, int src, int tag) override;
  WorkPtr recvAnysource(TensorList& tensors, int tag) override;

  // Messages without a work (cargo.cc). Only where shares_memory().
  std::shared_ptr<Completion> send_cargo(const Cargo& cargo, int dst, int tag) override;
  std::shared_ptr<Completion> receive_cargo(const Cargo& cargo, int tag) override;
  void wait_for(Completion& completion, const Interrupt& pause) override;
  void cancel(const Completion& completion) override { cpu_->cancel(completion); }

  // Tensors of messages in the sender's heap (cargo.cc).
  /// Copies a contiguous tensor of the CPU into the heap. Null if it is full, or if not all ranks
  /// map each other's.
  std::unique_ptr<PlacedMessage> place(const Tensor& tensor) const;
  /// Copies what another rank has placed into a new tensor in the heap, and tells it so.
  Tensor take_placed(int source, std::int64_t offset, at::IntArrayRef shape,
                     at::ScalarType dtype) const;

  // Queries for people and tools.
  /// True if the tensor lies in the registered memory of the group's device.
  bool holds(const Tensor& tensor) const;
  /// True if this library itself averages such tensors: 16 bits in float32, rounded once.
  /// Collective at a device's first tensor, as an all_reduce of it.
  bool averages(const Tensor& tensor) const {
    return serves(Site{"all_reduce", rank_, size_}, tensor, c10d::ReduceOp::AVG);
  }
  std::array<Traffic, kKinds> traffic() const;
  /// Bytes of this rank between nodes; nothing in a group of one host.
  std::optional<std::array<WireTraffic, kKinds>> traffic_between() const;
  std::string explain(Kind kind, std::size_t bytes, bool in_heaps) const;
  /// `bytes` are those of the call's largest tensor.
  Prediction predict(Kind kind, std::size_t bytes, bool in_heaps) const;
  std::string transport() const;
  /// The ranks of each host; none where torch's own groups carry everything.
  std::vector<std::vector<int>> hosts() const;
  /// True if the process of a rank of this host is known to have ended; of others it is not.
  bool has_ended(int rank) const;
  /// The costs that ways between nodes are chosen by; nothing in a group of one host.
  const std::optional<LevelCosts>& level_costs() const { return level_costs_; }
  /// True if the ranks share memory; else torch's own backends carry everything.
  bool shares_memory() const { return cpu_ != nullptr; }
  /// Why the group is unusable, or nothing.
  std::optional<std::string> failure() const;
  /// Null where torch's own backends carry everything.
  std::shared_ptr<Recorder> recorder() const { return recorder_; }
  /// Seconds of each of `samples` times the rows of calls on the tensors' rows, on the
  /// bare core, or of the bare motions of their bytes (bench/trial.h). Collective.
  std::vector<double> time_core(Kind kind, const Tensor& input, const Tensor& output, int samples);
  std::vector<double> time_ceiling(Kind kind, const Tensor& input, const Tensor& output,
                                   int samples);
  /// As shutdown(), but aborts calls that are still under way.
  void close_at_exit();
  /// Closes and drops what the group holds. Also called when only weak references
  /// are left (the exit hook has one), as these would keep its memory mapped.
  void release_resources() override;

 private:
  /// How one call is to run.
  struct Plan {
    const OpLabel& label;
    Tensors inputs;   // for the profiler
    Tensors outputs;  // the value of the work's future
    std::chrono::milliseconds timeout;
    bool async;
  };
  /// A message on a device's tensor. In a batch it is put off until all are known, as pairs of
  /// ranks must connect in one order.
  struct Message {
    const OpLabel& label;
    Tensor tensor;
    int peer;
    int tag;
    bool sends;
    std::optional<c10::Stream> stream{};  // the caller's, if it is put off
  };
  struct Coalescing {
    std::vector<WorkPtr> works;
    std::vector<Message> messages;
    std::vector<Fallback::Inner> inners;  // torch's backends that coalesce, too
    std::exception_ptr refused;           // the first message's error
  };

  Site at(const OpLabel& label) const { return {label.name(), rank_, size_}; }
  bool shares(const Tensor& tensor) const { return cpu_ && tensor.defined() && tensor.is_cpu(); }
  /// True if this library moves such tensors, or reduces them by `op`: in shared memory, or by
  /// kernels on their device. Collective at the first tensor on a device.
  bool serves(const Tensor& tensor) const;
  bool serves(const Site& site, const Tensor& tensor, const c10d::ReduceOp& op) const;
  bool serves_all(const Site& site, const TensorList& tensors, const c10d::ReduceOp& op) const;
  /// Has torch's own backend of the tensor's device run a collective, or carry a message.
  template <typename Operation>
  WorkPtr forward(const Tensor& tensor, Operation&& operation) {
    sequence_.add(1);
    return forward_message(tensor, operation);
  }
  template <typename Operation>
  WorkPtr forward_message(const Tensor& tensor, Operation&& operation);
  WorkPtr forward_to(const std::string& device_type,
                     const std::function<WorkPtr(c10d::Backend&)>& operation);
  WorkPtr reduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts);
  void agree_on_sparse(const Tensor& tensor, const c10d::AllreduceOptions& opts);
  const Tensor& only(const Site& site, const char* argument, const TensorList& tensors) const;

  void fill_gathered(Call& call, const Site& site, const TensorList& outputs, const Tensor& input);
  Call shard_gather(const Site& site, const Tensor& output, const Tensor& input);
  Call shard_reduction(const Site& site, const Tensor& output, const Tensor& input,
                       const c10d::ReduceOp& op);

  WorkPtr issue(const Plan& plan, Calls& calls);
  WorkPtr issue_on_device(const Plan& plan, Calls& calls);
  void run_here(Calls& calls, Clock::time_point deadline);
  WorkPtr run_later(const Plan& plan, Calls& calls);
  WorkPtr receive(const OpLabel& label, const Tensor& tensor, std::optional<int> source, int tag);
  WorkPtr carry(const Message& message);
  WorkPtr message_on_device(const Message& message);
  bool put_off(const Message& message);
  void send_put_off();
  template <typename Act>
  WorkPtr part_of_batch(Act&& act);
  std::exception_ptr refused();
  WorkPtr send_one(const Tensor& tensor, int dst, int tag);
  WorkPtr receive_one(const Tensor& tensor, int src, int tag);
  WorkPtr collect(WorkPtr work);
  /// Looks before locking: one thread makes the calls that it coalesces.
  bool coalescing() const { return coalesces_.read() != 0; }
  bool join_coalescing(const Fallback::Inner& inner);

  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_.read());
  }
  std::chrono::milliseconds timeout_of(std::chrono::milliseconds given) const {
    return given == c10d::kUnsetTimeout ? timeout() : bounded(given);
  }
  void require_home() const;
  void require_open() const;
  void require_turn(const OpLabel& label) const;
  c10::intrusive_ptr<DreamBackend> child(const StorePtr& store, int rank, int size,
                                         const c10::intrusive_ptr<DreamOptions>& options);
  std::string why_ended(int rank) const;
  /// The options of a group of those `ranks` of this one; without given options, with this one's.
  c10::intrusive_ptr<DreamOptions> options_for(
      const std::vector<int>& ranks, const c10::intrusive_ptr<c10d::Backend::Options>& given) const;
  void abort_for(const std::string& reason);
  /// Closes torch's own backends in a thread, each when its calls have ended.
  void close_fallback();
  void post_why_not_made(const std::string& reason);
  /// The communicator of a group on one host. Throws c10::ValueError for others; `what` opens it.
  Communicator& single_host(const char* what) const;
  /// Returns once all calls made so far have ended, with or without an error.
  void wait_for_calls();
  /// The three ways to make a group: here all ranks share memory, ...
  void share_within_host(std::unique_ptr<Fabric> fabric);
  /// ... here only those of each host; without either torch's own backends carry everything.
  void share_between_nodes(const ShmResult& whole, const ShmOptions& shm);
  /// `between_nodes`: null unless this host's ranks are a part of a multi-node group.
  std::shared_ptr<Communicator> make_communicator(std::unique_ptr<Fabric> fabric,
                                                  const CommOptions& options,
                                                  const Connection* between_nodes);
  void drop_heap(const std::string& reason);
  bool widens_halves() const;
  LongestWait longest_rendezvous() const;
  DeviceNodes device_nodes(HierarchicalCommunicator& all);
  /// With this library's kernels, if the option cuda says so.
  void serve_devices(const std::shared_ptr<Communicator>& host, std::optional<DeviceNodes> nodes);
  /// Agrees on the costs that algorithms are chosen by. Collective.
  void tune(Communicator& host, std::optional<Clock::time_point> deadline);
  void report();
  /// `alone`: without the peers, which may not take part.
  void close(bool alone);

  StorePtr store_;
  StorePtr visit_;  // store_, under keys that no earlier group on it has used
  const c10::intrusive_ptr<DreamOptions> options_;
  PythonCallbacks callbacks_;
  const ForkGuard process_;  // a forked child must not touch the group
  Gauge handling_;           // whether a signal handler runs inside a call of this group
  const Interrupt interrupt_;
  Fallback fallback_;
  std::thread closing_;                     // close_fallback()'s; close() waits for it
  std::shared_ptr<GroupCommunicator> cpu_;  // null: everything goes to fallback_
  std::unique_ptr<DeviceCommunicator> devices_ = std::make_unique<NoDevices>();
  std::shared_ptr<Liveness> liveness_;     // null where cpu_ is
  std::shared_ptr<StoreWorker> worker_;    // once there may be several nodes
  std::shared_ptr<Recorder> recorder_;     // of the group
  std::optional<LevelCosts> level_costs_;  // in a group on several nodes
  std::string setup_words_;                // lines of explain(): costs, or the map of hosts
  std::string reason_;                     // why memory is shared, or why not
  std::shared_ptr<CallbackThreads> callback_threads_ = std::make_shared<CallbackThreads>();
  std::shared_ptr<Outstanding> outstanding_ = std::make_shared<Outstanding>();
  std::shared_ptr<Heap> heap_;
  std::string no_heap_ = "heap_bytes is 0";  // why, if there is none
  std::shared_ptr<void> exit_hook_;

  Gauge timeout_ms_;
  Gauge sequence_;  // collectives issued; equal on all ranks at the same call
  Gauge closed_;
  Gauge reported_;
  Gauge coalesces_;  // whether coalescing_ has a value
  Gauge shrinks_;    // attempts
  Gauge shrunk_;     // whether a smaller group has taken this one's place

  std::vector<std::string> said_at_shrinks_;  // all ranks' posts when the last attempt failed
  std::mutex coalescing_mutex_;
  std::optional<Coalescing> coalescing_;
  std::mutex child_mutex_;
  c10::weak_intrusive_ptr<c10d::Backend> last_child_;  // a DreamBackend
};

template <typename Operation>
WorkPtr DreamBackend::forward_message(const Tensor& tensor, Operation&& operation) {
  const c10::Device device = tensor.device();
  const bool is_known = device.is_cpu() || device.is_cuda() || devices_->handles(device);
  TORCH_CHECK_VALUE(is_known, "rank ", rank_,
                    ": dreamcomm takes tensors on cpu and cuda, got one on ", device);
  return forward_to(device.is_cpu() ? "cpu" : "cuda", operation);
}

}  // namespace dreamcomm
