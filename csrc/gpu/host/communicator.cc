#include "gpu/host/communicator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "gpu/host/kernel_errors.h"
#include "gpu/host/select_algorithm.h"
#include "gpu/host/supported_ops.h"

namespace dreamcomm::gpu {
namespace {

constexpr std::uint64_t kStamp = 0x647265616d00;  // and the writer's rank

std::size_t index_of(int rank) { return static_cast<std::size_t>(rank); }

/// Where contiguous blocks begin; null if there are none. Blocks without bytes are ignored.
std::byte* row_of(std::span<const dreamcomm::Block> blocks, const char* which) {
  std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  for (const dreamcomm::Block& block : blocks) {
    if (block.bytes == 0) continue;
    if (begin == nullptr) begin = block.data;
    check(end == nullptr || block.data == end, ErrorKind::kInvalid,
          "expected the blocks of a call's ", which, " one after the other");
    end = block.data + block.bytes;
  }
  return begin;
}

std::size_t bytes_of(std::span<const dreamcomm::Block> blocks) {
  std::size_t bytes = 0;
  for (const dreamcomm::Block& block : blocks) bytes += block.bytes;
  return bytes;
}

std::size_t bytes_of_block(const Request& request) {
  if (request.kind == Kind::kAllToAll || request.kind == Kind::kBarrier) return 0;
  const auto& blocks = request.in.empty() ? request.out : request.in;
  return blocks.empty() ? 0 : blocks.front().bytes;
}

/// The reduction as kernels carry it out. Throws Error(kInvalid) if GPUs do not compute it.
Reduction reduction_of(const Request& request) {
  if (request.reduction.op == ReduceOp::kNone) return request.reduction;
  const std::optional<Reduction> computed = computed_as(request.reduction);
  check(computed.has_value(), ErrorKind::kInvalid, "GPUs do not compute ",
        name(request.reduction.op), " of ", name(request.reduction.dtype),
        " here: use SUM, AVG, PRODUCT, MIN or MAX of float32, float64, float16, bfloat16, uint8, ",
        "int8, int16, int32 or int64");
  return *computed;
}

std::int64_t nanoseconds_until(Clock::time_point deadline) {
  if (deadline == Clock::time_point::max()) return std::numeric_limits<std::int64_t>::max();
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now());
  return std::max<std::int64_t>(left.count(), 0);
}

Control& control_of(std::byte* memory) { return *reinterpret_cast<Control*>(memory); }
Report& report_of(std::byte* memory) { return *reinterpret_cast<Report*>(memory + kSector); }

}  // namespace

Communicator::Communicator(int rank, int size, std::unique_ptr<Driver> driver,
                           const CommunicatorOptions& options, int blocks, int sharing)
    : rank_(rank), size_(size), options_(options), sharing_(sharing), driver_(std::move(driver)) {
  layout_.page_bytes = options.page_bytes;
  layout_.blocks = blocks;
}

// Without close(), this rank does not know whether the peers' kernels still write into its memory.
// Then the driver and all its memory are kept.
Communicator::~Communicator() {
  if (released_) return;
  Driver& driver = *driver_;
  if (heap_) driver.keep(std::move(heap_));
  driver.keep(std::move(driver_));
}

void Communicator::allocate() {
  std::byte*& window = windows_[index_of(rank_)];
  window = driver_->allocate(layout_.bytes());
  // Includes the words for probe(), which must not allocate: peers' kernels may already wait.
  rounds_ = driver_->allocate(index_of(layout_.blocks + size_ + 1) * sizeof(std::uint64_t));
  shared_ = driver_->allocate_host(kSector + sizeof(Report));
  if (options_.heap_bytes > 0) {
    heap_ = {driver_->allocate(options_.heap_bytes),
             [driver = driver_](std::byte* memory) { driver->release(memory); }};
    heaps_[index_of(rank_)] = heap_.get();
  }
  // The memory is zero, as if round 0 had been published by all.
}

void Communicator::open(std::span<const MemoryName> windows, std::span<const MemoryName> heaps) {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    windows_[index_of(r)] = driver_->open(windows[index_of(r)]);
    if (heap_) heaps_[index_of(r)] = driver_->open(heaps[index_of(r)]);
  }
}

/// As in KernelArgs::in_place.
std::uint64_t Communicator::place_of(const std::byte* data, std::size_t bytes) const {
  const std::byte* const begin = heap_.get();
  const std::less_equal<const std::byte*> before;  // defined for unrelated pointers, too
  const bool is_there = begin != nullptr && bytes > 0 && before(begin, data) &&
                        before(data + bytes, begin + options_.heap_bytes);
  return is_there ? static_cast<std::uint64_t>(data - begin) + 1 : 0;
}

void Communicator::stamp_all() {
  const std::uint64_t stamp = kStamp + index_of(rank_);
  for (int r = 0; r < size_; ++r) {
    std::byte* mark = windows_[index_of(r)] + Layout::mark(rank_);
    driver_->copy(mark + offsetof(Mark, stamp), &stamp, sizeof stamp);
  }
}

void Communicator::check_stamps() {
  for (int r = 0; r < size_; ++r) {
    std::uint64_t found = 0;
    const std::byte* mark = windows_[index_of(rank_)] + Layout::mark(r);
    driver_->copy(&found, mark + offsetof(Mark, stamp), sizeof found);
    check(found == kStamp + index_of(r), ErrorKind::kSystem, "data that rank ", r,
          " wrote into the memory of this device has not arrived, though mapping it succeeded");
  }
}

/// Checks that kernels reach the peers' memory, since copies by the host take other paths.
void Communicator::probe(std::chrono::milliseconds patience) {
  const Clock::time_point deadline = deadline_in(Clock::now(), patience);
  std::byte* const word = rounds_ + index_of(layout_.blocks) * sizeof(std::uint64_t);
  std::byte* const all = word + sizeof(std::uint64_t);
  gather_words(AlgorithmId::kStaged, word, all, deadline);
  if (options_.heap_bytes >= sizeof(std::uint64_t)) {
    gather_words(AlgorithmId::kInPlace, heap_.get(), all, deadline);
    const std::uint64_t none = 0;  // no rank reads it after the call's last turn
    driver_->copy(heap_.get(), &none, sizeof none);
  }
  sequence_ = 0;  // errors count only the caller's calls
}

void Communicator::gather_words(AlgorithmId row, std::byte* word, std::byte* all,
                                Clock::time_point deadline) {
  const auto mark = [row](int rank) {
    return kStamp + 16 * (static_cast<std::uint64_t>(row) + 1) + index_of(rank);
  };
  const auto place = [all](int rank) { return all + index_of(rank) * sizeof(std::uint64_t); };
  const std::uint64_t own = mark(rank_);
  driver_->copy(word, &own, sizeof own);
  const dreamcomm::Block in{word, sizeof own};
  std::vector<dreamcomm::Block> out;
  for (int r = 0; r < size_; ++r) out.push_back({place(r), sizeof own});
  Request request;
  request.kind = Kind::kAllGather;
  request.in = std::span(&in, 1);
  request.out = out;
  request.deadline = deadline;
  KernelArgs args = args_of(request);
  args.info.row = static_cast<std::uint8_t>(row);
  ++sequence_;
  driver_->start(args, {static_cast<int>(args.info.blocks), options_.lanes}, driver_->stream());
  driver_->drain();
  if (const auto failed = failure()) throw Error(failed->kind(), failed->what());
  for (int r = 0; r < size_; ++r) {
    std::uint64_t found = 0;
    driver_->copy(&found, place(r), sizeof found);
    check(found == mark(r), ErrorKind::kSystem,
          "a kernel that gathers a number from each rank got ", found, " from rank ", r,
          " instead of ", mark(r),
          ": this device's kernels do not read that rank's memory correctly");
  }
}

Question Communicator::question(Kind kind, std::size_t bytes) const {
  return {.kind = kind,
          .bytes = bytes,
          .size = size_,
          .most_blocks = layout_.blocks,
          .lanes = options_.lanes,
          .registered = heap_ != nullptr,
          .asked = options_.asked,
          .costs = options_.costs};
}

KernelArgs Communicator::args_of(const Request& request) const {
  KernelArgs args;
  const Reduction reduction = reduction_of(request);
  const bool varies = request.kind == Kind::kAllToAll;
  args.bytes = bytes_of_block(request);
  const Choice choice = choose(question(request.kind, args.bytes));
  args.info = {.kind = request.kind,
               .op = reduction.op,
               .dtype = reduction.dtype,
               .row = static_cast<std::uint8_t>(choice.row),
               .root = request.root,
               .blocks = static_cast<std::uint32_t>(choice.grid.blocks),
               .page_bytes = static_cast<std::uint32_t>(layout_.page_bytes),
               .bytes = args.bytes};
  args.rank = rank_;
  args.size = size_;
  args.divisor = static_cast<int>(reduction.divisor);
  args.sequence = sequence_ + 1;
  args.in = row_of(request.in, "inputs");
  args.out = row_of(request.out, "outputs");
  for (std::size_t r = 0; varies && r < request.in.size(); ++r) {
    args.in_bytes[r] = request.in[r].bytes;
    args.out_bytes[r] = request.out[r].bytes;
  }
  std::copy(heaps_.begin(), heaps_.end(), args.heaps);
  args.in_place = place_of(args.in, bytes_of(request.in));
  args.out_place = place_of(args.out, bytes_of(request.out));
  std::copy(windows_.begin(), windows_.end(), args.windows);
  args.layout = layout_;
  args.rounds = reinterpret_cast<std::uint64_t*>(rounds_);
  args.control = &control_of(shared_);
  args.report = &report_of(shared_);
  args.patience_ns = nanoseconds_until(request.deadline);
  return args;
}

void Communicator::run(const Request& request, void* stream) {
  if (const std::optional<Error> failed = refusal()) {
    throw Error(ErrorKind::kAborted,
                concat(about_, dreamcomm::describe(request), " on rank ", rank_,
                       ": the group takes no more tensors on GPUs: ", failed->what()));
  }
  const KernelArgs args = args_of(request);
  const Grid grid{static_cast<int>(args.info.blocks), options_.lanes};
  driver_->start(args, grid, stream);
  ++sequence_;
}

void Communicator::put_verdict(std::byte* word, void* stream) {
  static_assert(sizeof(Report::reason) == kVerdictBytes);
  driver_->copy_later(word, &report_of(shared_).reason, kVerdictBytes, stream);
}

void Communicator::take_verdict(const std::byte* word, void* stream) {
  static_assert(sizeof(Control::other_node_failed) == kVerdictBytes);
  driver_->copy_later(&control_of(shared_).other_node_failed, word, kVerdictBytes, stream);
}

std::optional<Error> Communicator::refusal() const {
  const std::scoped_lock lock(closing_);
  if (closed_) return Error(ErrorKind::kAborted, "the group was closed");
  return current_failure();
}

std::optional<Error> Communicator::failure() const {
  const std::scoped_lock lock(closing_);
  std::optional<Error> failed = current_failure();
  if (failed) failed = Error(failed->kind(), about_ + failed->what());
  return failed;
}

std::optional<Error> Communicator::failure_of_calls() const {
  const std::scoped_lock lock(closing_);
  std::optional<Error> failed = kernel_failure();
  if (failed) failed = Error(failed->kind(), about_ + failed->what());
  return failed;
}

/// Keeps the text of the first call, because a rank that was late then may have ended since.
std::optional<Error> Communicator::kernel_failure() const {
  if (reported_ || shared_ == nullptr) return reported_;
  // A kernel may still be writing the report: it writes the reason last.
  const Report& report = report_of(shared_);
  auto* reason = const_cast<std::uint64_t*>(&report.reason);
  if (std::atomic_ref(*reason).load(std::memory_order_acquire) != Report::kNone) {
    reported_ = error_of(report, size_, peer_reports_);
    return reported_;
  }
  if (std::atomic_ref(control_of(shared_).other_node_failed).load(std::memory_order_acquire) != 0) {
    return Error(
        ErrorKind::kPeerLost,
        "a call on GPUs has failed on a rank of another host, whose error says why; do not use the "
        "call's results");
  }
  return std::nullopt;
}

std::optional<Error> Communicator::current_failure() const {
  if (std::optional<Error> failed = kernel_failure()) return failed;
  if (!aborted_.load()) return std::nullopt;
  const std::string lost = peer_reports_.lost ? peer_reports_.lost() : "";
  if (!lost.empty()) return Error(ErrorKind::kPeerLost, lost);
  return Error(ErrorKind::kAborted, "abort() was called");
}

void Communicator::abort() {
  const std::scoped_lock lock(closing_);
  if (shared_ == nullptr) return;
  aborted_.store(true);
  std::atomic_ref(control_of(shared_).abort).store(1, std::memory_order_release);
}

void Communicator::close(const Exchange& exchange) {
  {
    const std::scoped_lock lock(closing_);
    if (std::exchange(closed_, true)) return;
  }
  // A rank that cannot drain reports it to the others, because they wait for it.
  bool drained = true;
  try {
    driver_->drain();
  } catch (const Error&) {
    drained = false;
  }
  const auto all_say = [&](bool mine) {
    std::vector<std::byte> all(index_of(size_));
    const auto said = static_cast<std::byte>(mine);
    exchange(std::span(&said, 1), all);
    return std::all_of(all.begin(), all.end(), [](std::byte one) { return one == std::byte{1}; });
  };
  if (!all_say(drained)) return;
  unmap_peers();
  all_say(true);
  for (std::byte* memory : {windows_[index_of(rank_)], rounds_}) {
    if (memory != nullptr) driver_->release(memory);
  }
  std::byte* shared = nullptr;
  {
    const std::scoped_lock lock(closing_);
    if (shared_ != nullptr && !reported_) reported_ = current_failure();
    std::swap(shared, shared_);
  }
  if (shared != nullptr) driver_->release_host(shared);
  windows_ = {};
  rounds_ = nullptr;
  heap_ = nullptr;
  released_ = true;
}

void Communicator::unmap_peers() {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    for (std::byte* memory : {windows_[index_of(r)], heaps_[index_of(r)]}) {
      if (memory != nullptr) driver_->close(memory);
    }
  }
  heaps_ = {};
}

std::string Communicator::explain(Kind kind, std::size_t bytes) const {
  const Question asked = question(kind, bytes);
  const Choice choice = choose(asked);
  std::string text =
      concat(dreamcomm::name(kind), " of ", bytes, " bytes there: ", name(choice.row), " by ",
             choice.grid.blocks, " blocks");
  if (kind == Kind::kAllReduce) {
    const auto us = std::lround(expected_seconds(choice.row, asked) * 1e6);
    text += concat(", expected to take ", us, " us by fixed costs of one device's memory");
  }
  return text;
}

std::string Communicator::describe() const {
  return concat("GPU kernels: ", size_, " ranks, this one on ", driver_->describe(), ", ", sharing_,
                sharing_ == 1 ? " rank" : " ranks", " on that device, up to ", layout_.blocks,
                " blocks each");
}

}  // namespace dreamcomm::gpu
