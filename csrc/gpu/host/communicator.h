// A rank's membership in a group for tensors on GPUs.
//
// Memory. The kernels of all ranks write into a window. So it is released only when all ranks have
// drained their kernels and closed it. If they cannot agree on that (a peer died), it is kept for
// the life of the process. That memory is lost, but no kernel writes into memory that now has
// another owner.
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

/// A collective among the group's ranks: `all` gets every rank's `mine`, in rank order, the same
/// number of bytes from each. Throws Error if it cannot.
using Exchange = std::function<void(std::span<const std::byte> mine, std::span<std::byte> all)>;

struct CommunicatorOptions {
  std::size_t page_bytes = Layout{}.page_bytes;
  /// Most blocks of a call's kernel; each block occupies a multiprocessor. If ranks start the
  /// kernels of several groups in different order, these must fit on the device together.
  /// Otherwise each waits for a peer's kernel that cannot start. Three fit on 108 multiprocessors.
  int most_blocks = 32;
  int lanes = 512;
  std::size_t heap_bytes = 0;  // of registered memory, for each rank
  Costs costs{};
  std::optional<AlgorithmId> asked{};  // for all_reduce, regardless of costs

  bool operator==(const CommunicatorOptions&) const = default;
};

class Communicator;

/// The result of a bootstrap; the same on all ranks.
struct BootstrapResult {
  std::unique_ptr<Communicator> group;  // or null, and then
  std::string why_not;                  // which rank cannot, and why
};

/// Collective. Makes the group's memory known to all ranks. Then every rank writes into every
/// window, each owner checks what has arrived, and all make calls with known results, because a
/// driver does not always do what it reports that it can. Those calls may take `patience`, since
/// devices may have other work. `make_driver` may throw. Throws what `exchange` throws.
BootstrapResult bootstrap(int rank, int size,
                          const std::function<std::unique_ptr<Driver>()>& make_driver,
                          const CommunicatorOptions& options, const Exchange& exchange,
                          std::chrono::milliseconds patience = std::chrono::minutes(1));

class Communicator {
 public:
  ~Communicator();  // keeps the memory, unless close() has released it
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Starts the call on a stream and returns. The blocks of in are contiguous, and so are those of
  /// out. Throws Error: kInvalid for what GPUs do not do here, kAborted with the reason if an
  /// earlier call has failed, which ends the group.
  void run(const Request& request, void* stream);

  /// For groups on several nodes, in the order of a stream. put_verdict() writes this node's result
  /// to device memory, for the ranks of other nodes: 0, or not 0 if a call has failed here.
  /// take_verdict() reads theirs, and ends the group if it is not 0.
  static constexpr std::size_t kVerdictBytes = sizeof(std::uint64_t);
  void put_verdict(std::byte* word, void* stream);
  void take_verdict(const std::byte* word, void* stream);

  /// Why a call failed, as kernels have reported so far, or why calls are refused now. Works also
  /// after close(). Any thread.
  std::optional<Error> failure() const;
  /// Only what kernels have reported.
  std::optional<Error> failure_of_calls() const;
  /// Ends this rank's kernels under way, and those of the peers that wait with them; later
  /// calls fail. Any thread.
  void abort();
  /// This rank's registered memory, or null: calls on tensors anywhere in it work in place.
  /// It lives as long as it is held, also after close(). Any thread.
  std::shared_ptr<std::byte> heap() const { return heap_; }
  /// Waits for this rank's kernels.
  void drain() { driver_->drain(); }
  /// Collective: drains, then releases the memory, or keeps it if some rank cannot drain. Throws
  /// what `exchange` throws; the memory is kept then.
  void close(const Exchange& exchange);

  std::string describe() const;
  /// How a call of a kind on so many bytes would be carried out, as a text for users.
  std::string explain(Kind kind, std::size_t bytes) const;
  /// Sets the text that errors begin with, which names the group if its ranks are numbered
  /// differently from the caller's, and what the host knows of the ranks. Call it before the first
  /// call.
  void describe_as(std::string about, PeerReports peer_reports) {
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
  void unmap_peers();
  void stamp_all();
  void check_stamps();
  Question question(Kind kind, std::size_t bytes) const;
  KernelArgs args_of(const Request& request) const;
  std::optional<Error> refusal() const;
  std::optional<Error> kernel_failure() const;
  std::optional<Error> current_failure() const;
  void probe(std::chrono::milliseconds patience);
  void gather_words(AlgorithmId row, std::byte* word, std::byte* all, Clock::time_point deadline);

  const int rank_;
  const int size_;
  const CommunicatorOptions options_;
  std::string about_;
  PeerReports peer_reports_;
  const int sharing_;  // number of ranks on this rank's device
  std::shared_ptr<Driver> driver_;
  Layout layout_;
  std::array<std::byte*, kMaxRanks> windows_{};
  std::array<std::byte*, kMaxRanks> heaps_{};  // this rank's: heap_
  std::shared_ptr<std::byte> heap_;
  std::byte* rounds_ = nullptr;
  mutable std::mutex closing_;
  std::byte* shared_ = nullptr;            // Control, then Report; guarded by closing_, as are:
  mutable std::optional<Error> reported_;  // the error of the kernels' report
  bool closed_ = false;
  bool released_ = false;
  std::uint64_t sequence_ = 0;
  std::atomic<bool> aborted_{false};
};

}  // namespace dreamcomm::gpu
