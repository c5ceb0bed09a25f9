// A rank's membership in a group for tensors on GPUs.
//
// Memory. A window is written by the kernels of all ranks. So it is released only when all
// ranks have drained their kernels and closed it; where they cannot agree on that (a peer
// died), it is kept for the life of the process: memory lost, but nobody writes into what
// has been given to others.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "core/error.h"
#include "core/request.h"
#include "gpu/choice.h"
#include "gpu/driver.h"

namespace dreamcomm::gpu {

/// Collective among the group's ranks: `all` gets what every rank brought, in rank order,
/// as many bytes from each. Throws Error if it cannot.
using Exchange = std::function<void(std::span<const std::byte> mine, std::span<std::byte> all)>;

struct GroupOptions {
  std::size_t page_bytes = std::size_t{64} << 10;
  int most_blocks = 64;  // of a call's kernel
  int lanes = 512;
  std::size_t heap_bytes = 0;  // of registered memory, for each rank
  Costs costs{};

  bool operator==(const GroupOptions&) const = default;
};

class Group;

/// What became of a meeting; the same on all ranks.
struct Meeting {
  std::unique_ptr<Group> group;  // or null, and then
  std::string why_not;           // which rank cannot, and why
};

/// Collective. Makes the group's memory known to all ranks, and lets every rank write into
/// every window and its owner look, as what a driver says it can do is not always so.
/// `make_driver` may throw. Throws what `exchange` throws.
Meeting meet(int rank, int size, const std::function<std::unique_ptr<Driver>()>& make_driver,
             const GroupOptions& options, const Exchange& exchange);

class Group {
 public:
  ~Group();  // keeps the memory, unless closed
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

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

  /// Why a call failed, as the kernels have told so far; also after close(). Any thread.
  std::optional<Error> failure() const;
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
  /// What errors begin with from now on: whose group it is, where ranks are not those that
  /// people know. Before the first call.
  void speak_of(std::string about) { about_ = std::move(about); }

 private:
  friend Meeting meet(int, int, const std::function<std::unique_ptr<Driver>()>&,
                      const GroupOptions&, const Exchange&);
  Group(int rank, int size, std::unique_ptr<Driver> driver, const GroupOptions& options, int blocks,
        int sharing);

  void allocate();
  void open(std::span<const MemoryName> windows, std::span<const MemoryName> heaps);
  std::uint64_t place_of(const std::byte* data, std::size_t bytes) const;
  void let_go_of_peers();
  void stamp_all();
  void look_for_stamps();
  Task task_of(const Request& request) const;
  std::optional<Error> refusal() const;
  std::optional<Error> failure_told() const;

  const int rank_;
  const int size_;
  const GroupOptions options_;
  std::string about_;
  const int sharing_;  // ranks of this rank's device
  std::shared_ptr<Driver> driver_;
  Layout layout_;
  std::array<std::byte*, kMaxRanks> windows_{};
  std::array<std::byte*, kMaxRanks> heaps_{};  // this rank's: heap_
  std::shared_ptr<std::byte> heap_;
  std::byte* rounds_ = nullptr;
  mutable std::mutex closing_;
  std::byte* told_ = nullptr;  // Control, then Report; guarded by closing_, as are:
  std::optional<Error> last_told_;
  bool closed_ = false;
  bool released_ = false;
  std::uint64_t sequence_ = 0;
  std::atomic<bool> aborted_{false};
};

}  // namespace dreamcomm::gpu
