#include "comm/tuning/measure.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "core/request.h"
#include "core/schedule.h"

namespace dreamcomm {
namespace {

constexpr int kTurns = 64;
/// All ranks together take no more memory than this for one tensor each.
constexpr std::size_t kMost = std::size_t{256} << 20;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Seconds per byte of every kind of copy in one run.
using Sample = std::array<double, kCopyKinds>;

/// Times the copies of calls on tensors of one size. Every run rewrites its tensors first, as a
/// training step does, so that none is measured on a copy that another core still holds. A copy
/// touches no more memory of a rank than that size: how much memory a call touches determines from
/// which cache its bytes are read.
class Course {
 public:
  Course(Rounds& rounds, Primitives::Scratch& scratch, Heap* heap, WaitObserver& observer,
         std::size_t bytes)
      : rounds_(rounds),
        scratch_(scratch),
        observer_(observer),
        bytes_(bytes),
        size_(static_cast<std::size_t>(rounds.size())),
        private_(bytes) {
    if (heap != nullptr) shared_ = heap->allocate(bytes);
    const std::span<std::byte> own = rounds.heap(rounds.rank());
    if (shared_) place_ = static_cast<std::uint64_t>(shared_.get() - own.data()) + 1;
  }

  /// Touches all memory, and lets the writer of pages end its first trials.
  void warm_up() {
    Sample sample{};
    in_heaps(sample);
    const std::size_t runs = bytes_ <= std::size_t{1} << 20 ? AdaptiveCopy::kTrials / 2 + 1 : 1;
    for (std::size_t i = 0; i < runs; ++i) {
      through_pages(sample, CopyKind::kTake);
      through_pages(sample, CopyKind::kFold);
    }
  }
  /// True if all ranks' tensors lay in heaps; the same on all.
  bool had_heaps() const { return had_heaps_; }

  Sample run() {
    Sample sample{};
    through_pages(sample, CopyKind::kTake);
    through_pages(sample, CopyKind::kFold);
    in_heaps(sample);
    return sample;
  }

 private:
  static double& of(Sample& sample, CopyKind motion) {
    return sample[static_cast<std::size_t>(motion)];
  }
  static constexpr Reduction kSum{.dtype = DType::kFloat32, .op = ReduceOp::kSum};

  void rewrite(std::byte* data) const { std::memset(data, 0x3f, bytes_); }  // 0.75 each

  Primitives prims() const {
    Opening opening;
    opening.in = opening.out = place_;
    return Primitives(rounds_, opening, observer_, scratch_);
  }

  /// Writes pages and reads them in one way, chunk by chunk. Folds work in place. Takes copy from
  /// one half of the tensor into the other: into the bytes just given they would hit a near cache,
  /// which no call does.
  void through_pages(Sample& sample, CopyKind reads) {
    rewrite(private_.data());
    const bool folds = reads == CopyKind::kFold;
    const std::size_t amount = folds ? bytes_ : bytes_ / 2;
    std::byte* to = private_.data() + (bytes_ - amount);
    Primitives going = prims();
    double written = 0;
    double read = 0;
    const std::size_t room = align_down(going.room(), Primitives::kAlign);
    for (std::size_t c = 0; c < chunks(amount, room); ++c) {
      const Range part = chunk(amount, room, c);
      auto begin = Clock::now();
      going.put(0, private_.data() + part.begin, part.size(), 1);
      written += seconds_since(begin);
      going.exchange(Peers::all(), Peers::all());
      begin = Clock::now();
      read_pages(going, to + part.begin, part.size(), folds);
      read += seconds_since(begin);
    }
    const auto bytes = static_cast<double>(amount);
    const std::size_t sources = folds ? size_ : std::max<std::size_t>(1, size_ - 1);
    of(sample, CopyKind::kGive) = written / bytes;
    of(sample, reads) = read / (static_cast<double>(sources) * bytes);
  }

  void read_pages(Primitives& going, std::byte* to, std::size_t bytes, bool folds) {
    if (folds) {
      going.reduce_all(kSum, to, 0, to, bytes / sizeof(float));
      return;
    }
    for (int i = 0; i < std::max(1, going.size() - 1); ++i) {
      going.get(to, (going.rank() + 1 + i) % going.size(), 0, bytes);
    }
  }

  /// Reads one half of a tensor and writes the other half of the own, so that no rank writes what
  /// another reads.
  void in_heaps(Sample& sample) {
    const std::size_t half = bytes_ / 2;
    const auto bytes = static_cast<double>(half);
    const auto all = static_cast<double>(size_);
    of(sample, CopyKind::kFoldHeaps) =
        in_place(all * bytes, of(sample, CopyKind::kFold), [&](Primitives& going) {
          going.reduce_heap(kSum, half, shared_.get(), half / sizeof(float));
        });
    of(sample, CopyKind::kReduceHeaps) =
        in_place(2 * bytes, of(sample, CopyKind::kFold), [&](Primitives& going) {
          const Range mine = shard(bytes_ / sizeof(float), going.size(), going.rank());
          going.reduce_heaps(kSum, mine.begin * sizeof(float), Peers::all(), mine.size());
        });
    of(sample, CopyKind::kPull) =
        in_place(bytes, of(sample, CopyKind::kTake), [&](Primitives& going) {
          copy_bytes(shared_.get(), going.in((going.rank() + 1) % going.size()) + half, half);
        });
  }

  /// Seconds per byte of a copy in heaps; `otherwise` if one rank has no room in its heap. All
  /// ranks turn the same rounds either way.
  template <typename Move>
  double in_place(double bytes, double otherwise, const Move& move) {
    if (shared_) rewrite(shared_.get());
    Primitives going = prims();
    going.open();
    const bool possible = going.all_in();
    had_heaps_ = possible;
    const auto begin = Clock::now();
    if (possible) move(going);
    const double seconds = seconds_since(begin);
    going.exchange(Peers::all(), Peers::all());
    return possible ? seconds / bytes : otherwise;
  }

  Rounds& rounds_;
  Primitives::Scratch& scratch_;
  WaitObserver& observer_;
  const std::size_t bytes_;
  const std::size_t size_;
  std::vector<std::byte> private_;
  std::shared_ptr<std::byte> shared_;
  std::uint64_t place_ = 0;
  bool had_heaps_ = false;
};

/// Small copies are noisy, large ones slow.
int repeats_of(std::size_t bytes) {
  if (bytes <= std::size_t{256} << 10) return 15;
  return bytes <= std::size_t{8} << 20 ? 5 : 2;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<long>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Times calls that move next to nothing: the cost of a turn between ranks that also do other work.
double time_of_turn(Rounds& rounds, Primitives::Scratch& scratch, WaitObserver& observer) {
  std::array<float, 16> data{};
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  std::vector<double> seconds;
  for (int repeat = 0; repeat < 7; ++repeat) {
    const auto begin = Clock::now();
    for (int i = 0; i < kTurns; ++i) {
      Primitives prims(rounds, Opening{}, observer, scratch);
      prims.put(0, bytes, sizeof data, 1);
      prims.exchange(Peers::all(), Peers::all());
      prims.reduce_all({.dtype = DType::kFloat32, .op = ReduceOp::kMax}, bytes, 0, bytes,
                       data.size());
    }
    seconds.push_back(seconds_since(begin) / kTurns);
  }
  return median(seconds);
}

/// Rank 0's value, on all ranks.
bool as_rank_0(Rounds& rounds, WaitObserver& observer, bool mine) {
  std::memcpy(rounds.page(), &mine, sizeof mine);
  rounds.turn(Peers::all(), Peers::all(), observer);
  bool theirs = false;
  std::memcpy(&theirs, rounds.from(0), sizeof theirs);
  return theirs;
}

/// The largest value of all ranks, for each number.
Costs slowest(Rounds& rounds, WaitObserver& observer, const Costs& mine) {
  static_assert(std::is_trivially_copyable_v<Costs>);
  std::memcpy(rounds.page(), &mine, sizeof mine);
  rounds.turn(Peers::all(), Peers::all(), observer);
  Costs result = mine;
  for (int rank = 0; rank < rounds.size(); ++rank) {
    Costs theirs;
    std::memcpy(&theirs, rounds.from(rank), sizeof theirs);
    result.turn = std::max(result.turn, theirs.turn);
    for (std::size_t m = 0; m < kCopyKinds; ++m) {
      for (std::size_t i = 0; i < Costs::kSizes.size(); ++i) {
        result.rates[m][i] = std::max(result.rates[m][i], theirs.rates[m][i]);
      }
    }
  }
  return result;
}

}  // namespace

Measured measure_costs(Rounds& rounds, Primitives::Scratch& scratch, Heap* heap,
                       WaitObserver& observer) {
  const auto begin = Clock::now();
  Costs costs;
  bool complete = true;
  costs.turn = time_of_turn(rounds, scratch, observer);
  bool goes_on = true;
  for (std::size_t i = 0; i < Costs::kSizes.size(); ++i) {
    const std::size_t bytes = Costs::kSizes[i];
    const bool fits = bytes * static_cast<std::size_t>(rounds.size()) <= kMost;
    goes_on = as_rank_0(rounds, observer,
                        i == 0 || (goes_on && fits && Clock::now() - begin < kMeasuringTime));
    if (!goes_on) {
      for (Costs::Rates& rates : costs.rates) rates[i] = rates[i - 1];
      continue;
    }
    Course course(rounds, scratch, heap, observer, bytes);
    const int repeats = repeats_of(bytes);
    std::vector<Sample> samples;
    course.warm_up();
    for (int repeat = 0; repeat < repeats; ++repeat) samples.push_back(course.run());
    for (std::size_t m = 0; m < kCopyKinds; ++m) {
      std::vector<double> values;
      for (const Sample& sample : samples) values.push_back(sample[m]);
      costs.rates[m][i] = median(values);
    }
    complete = complete && course.had_heaps();
  }
  return {slowest(rounds, observer, costs), complete};
}

}  // namespace dreamcomm
