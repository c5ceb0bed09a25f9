// The context of a call on the host's memory: shared memory, and a link between hosts.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "comm/communicator.h"
#include "core/flag.h"
#include "core/timeline.h"
#include "internode/collectives/hier_context.h"
#include "internode/collectives/preposted_receives.h"
#include "internode/liveness/abort_reasons.h"
#include "internode/liveness/connection_monitor.h"
#include "internode/liveness/failure_cause.h"
#include "internode/liveness/wait_interrupter.h"
#include "transport/shm/heap.h"

namespace dreamcomm {

/// The parts of a multi-node group that a rank uses in every call.
struct Levels {
  Communicator& host;  // the ranks of this one's host
  const Topology& topology;
  Link& link;
  WaitInterrupter& interrupter;
  ConnectionMonitor& monitor;
  PrepostedReceives& envelopes;
  const std::shared_ptr<Heap>& heap;  // of this process; null: none
  /// 1 once a call within the host has failed, so that a late peer may still write.
  std::shared_ptr<Mark> call_failed;
  const AbortReasons& reasons;
  const FailureCause& causes;
  int rank;  // in the group
  bool widens_halves;
};

class LinkContext final : public HierContext {
 public:
  /// `number` counts the group's calls. All references must outlive the context.
  LinkContext(const Levels& levels, const Request& request, std::uint64_t number, std::size_t chunk,
              const Interrupt& interrupt);

  void run_on_host(Kind kind, const Reduction& how, std::span<const Block> in,
                   std::span<const Block> out, int root = 0) override;
  /// The first collective of a call: no rank of another host returns from the call before it. So it
  /// is aborted if one of them is lost.
  void gather_on_host(std::span<const Block> in, std::span<const Block> out);
  /// In the heap if there is room. Heap memory is not used again once a call within the host has
  /// failed.
  Cargo allocate(std::size_t bytes) const override;
  Cargo keep(const Block& block) override;
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override;
  Cargo widened(const TwoStepReduction& steps, std::byte* in, std::size_t count) override;
  void combine(const TwoStepReduction& steps, std::span<const std::byte* const> of_hosts,
               std::byte* out, std::size_t count) override;
  void send(int rank, const Cargo& cargo, std::uint32_t number) override;
  void receive(int rank, const Cargo& cargo, std::uint32_t number) override;
  void depart(std::uint32_t) override {}  // each message departs at once
  /// Exchanges the leaders' openings: sends `mine` to the other hosts' leaders, and returns what
  /// they send, up to `most` bytes, by host.
  std::vector<Cargo> exchange_openings(const Cargo& mine, std::size_t most);
  Transfers sends() override;
  Transfers receives() override;
  void wait(const Transfers& transfers) override;
  /// Subtracts bytes of a room that a message left empty: its size was not known before.
  void left_empty(std::size_t bytes) { traffic_.received -= bytes; }

  /// The last rank of a wait: last_here() of the last collective within the host, last_between() of
  /// the other hosts' ranks whose messages the last wait was for, if it had to wait for them.
  LastToCome last_here() const;
  LastToCome last_between() const { return last_between_; }
  /// The last rank to make this call: of the ranks of this host, and of the others, by the time at
  /// which their message arrived.
  struct Latest {
    LastToCome here;
    LastToCome between;
  };
  Latest latest;

  /// Records waits for other hosts there, as the call's `number`; null: does not.
  void note_in(Timeline* timeline, std::int64_t number) {
    timeline_ = timeline;
    noted_as_ = number;
  }

 private:
  std::uint32_t tag(std::uint32_t number) const;
  Clock::duration slack() const;
  Cargo allocate_private(std::size_t bytes) const;
  std::vector<int> remote_ranks() const;
  void run_here(Request& part, const Interrupt& interrupt);
  [[noreturn]] void fail_for_remote(int rank, const std::string& failure, Clock::duration waited);
  std::string report_of_host(int rank, std::chrono::milliseconds moment) const;
  std::string waiting_for(int rank) const;
  [[noreturn]] void fail_for(int rank, const Error& error) const;
  void send_as(int rank, const Cargo& cargo, std::uint32_t tag);
  template <typename Begin>
  std::shared_ptr<Parcel> begun(int rank, Begin&& begin) const;

  const Levels& levels_;
  const Request& request_;
  const std::uint64_t number_;
  const Interrupt& interrupt_;
  const Clock::time_point begin_ = Clock::now();
  Transfers sends_;
  Transfers receives_;
  LastToCome last_between_;
  Timeline* timeline_ = nullptr;
  std::int64_t noted_as_ = 0;
  bool warned_ = false;       // the user was warned of a wait for another host
  bool lost_remote_ = false;  // a rank of another host, while one of this host was waited for
};

}  // namespace dreamcomm
