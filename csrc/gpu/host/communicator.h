// A rank's membership in a group for tensors on GPUs.
//
// Memory. A window is written by the kernels of all ranks. So it is released only when all
// ranks have drained their kernels and closed it; where they cannot agree on that (a peer
// died), it is kept for the life of the process: memory lost, but nobody writes into what
// has been given to others.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "core/error.h"
#include "core/request.h"
#include "gpu/host/driver.h"
#include "gpu/host/kernel_errors.h"
#include "gpu/host/select_algorithm.h"

namespace dreamcomm::gpu {

/// Collective among the group's ranks: `all` gets what every rank brought, in rank order,
/// as many bytes from each. Throws Error if it cannot.
using Exchange = std::function<void(std::span<const std::byte> mine, std::span<std::byte> all)>;

struct CommunicatorOptions {
  std::size_t page_bytes = Layout{}.page_bytes;
  /// Of a call's kernel, whose blocks take a multiprocessor each. Kernels of several groups that
  /// ranks start in different order must fit beside each other, or each waits for a peer's that
  /// finds no room: three do on 108 multiprocessors.
  int most_blocks = 32;
  int lanes = 512;
  std::size_t heap_bytes = 0;  // of registered memory, for each rank
  Costs costs{};
  std::optional<AlgorithmId> asked{};  // for all_reduce, whatever the costs

  bool operator==(const CommunicatorOptions&) const = default;
};

class Communicator;

/// What became of a meeting; the same on all ranks.
struct BootstrapResult {
  std::unique_ptr<Communicator> group;  // or null, and then
  std::string why_not;                  // which rank cannot, and why
};

/// Collective. Makes the group's memory known to all ranks, lets every rank write into every
/// window and its owner look, and then all make calls whose results are known, as what a driver
/// says it can do is not always so. Those may take `patience`: devices may have other work.
/// `make_driver` may throw. Throws what `exchange` throws.
BootstrapResult bootstrap(int rank, int size,
                          const std::function<std::unique_ptr<Driver>()>& make_driver,
                          const CommunicatorOptions& options, const Exchange& exchange,
                          std::chrono::milliseconds patience = std::chrono::minutes(1));

class Communicator {
 public:
  ~Communicator();  // keeps the memory, unless closed
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Starts the call on a stream and returns. The blocks of in, and those of out, lie one
  /// after the other. Throws Error: kInvalid for what GPUs do not do here, or why an earlier
  /// call failed, which ends the group.
  void run(const Request& request, void* stream);

  /// Of groups on several hosts, in the order of a stream: a word of the device for the ranks of
  /// other hosts, 0 or that a call has failed here; and theirs, which ends the group if it is not
  /// 0.
  static constexpr std::size_t kVerdictBytes = sizeof(std::uint64_t);
  void put_verdict(std::byte* word, void* stream);
  void take_verdict(const std::byte* word, void* stream);

  /// Why a call failed, as the kernels have told so far, or why none may be made any more; also
  /// after close(). Any thread.
  std::optional<Error> failure() const;
  /// Only what kernels have told.
  std::optional<Error> failure_of_calls() const;
  /// Ends this rank's kernels under way, and those of the peers that wait with them; later
  /// calls fail. Any thread.
  void abort();
  /// This rank's registered memory, or null: calls on tensors anywhere in it work in place.
  /// It lives as long as it is held, also after close(). Any thread.
  std::shared_ptr<std::byte> heap() const { return heap_; }
  /// Waits for this rank's kernels.
  void drain() { driver_->drain(); }
  /// Collective: drains, then releases the memory, or keeps it if a rank has to. Throws what
  /// `exchange` throws, and keeps it then.
  void close(const Exchange& exchange);

  std::string describe() const;
  /// How a call of a kind on so many bytes would go, for people.
  std::string explain(Kind kind, std::size_t bytes) const;
  /// What errors begin with from now on: whose group it is, where ranks are not those that
  /// people know; and what else is known of the ranks. Before the first call.
  void speak_of(std::string about, PeerReports peer_reports) {
    about_ = std::move(about);
    peer_reports_ = std::move(peer_reports);
  }

 private:
  friend BootstrapResult bootstrap(int, int, const std::function<std::unique_ptr<Driver>()>&,
                                   const CommunicatorOptions&, const Exchange&,
                                   std::chrono::milliseconds);
  Communicator(int rank, int size, std::unique_ptr<Driver> driver,
               const CommunicatorOptions& options, int blocks, int sharing);

  void allocate();
  void open(std::span<const MemoryName> windows, std::span<const MemoryName> heaps);
  std::uint64_t place_of(const std::byte* data, std::size_t bytes) const;
  void let_go_of_peers();
  void stamp_all();
  void look_for_stamps();
  Question question(Kind kind, std::size_t bytes) const;
  KernelArgs args_of(const Request& request) const;
  std::optional<Error> refusal() const;
  std::optional<Error> told_by_kernels() const;
  std::optional<Error> failure_told() const;
  void probe(std::chrono::milliseconds patience);
  void gather_words(AlgorithmId row, std::byte* word, std::byte* all, Clock::time_point deadline);

  const int rank_;
  const int size_;
  const CommunicatorOptions options_;
  std::string about_;
  PeerReports peer_reports_;
  const int sharing_;  // ranks of this rank's device
  std::shared_ptr<Driver> driver_;
  Layout layout_;
  std::array<std::byte*, kMaxRanks> windows_{};
  std::array<std::byte*, kMaxRanks> heaps_{};  // this rank's: heap_
  std::shared_ptr<std::byte> heap_;
  std::byte* rounds_ = nullptr;
  mutable std::mutex closing_;
  std::byte* told_ = nullptr;                 // Control, then Report; guarded by closing_, as are:
  mutable std::optional<Error> told_so_far_;  // as put into words
  bool closed_ = false;
  bool released_ = false;
  std::uint64_t sequence_ = 0;
  std::atomic<bool> aborted_{false};
};

}  // namespace dreamcomm::gpu
