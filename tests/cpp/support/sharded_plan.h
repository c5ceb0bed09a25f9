// Sharded passes over known tensors, and their expected results.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "core/sharded_pass.h"
#include "cpp/support/calls.h"

namespace dreamcomm::testing {

inline constexpr std::size_t kTile = 16384;  // elements that a pass hands to apply() at most
inline constexpr std::size_t kHeapBytes = std::size_t{32} << 20;

/// A parameter, the same on all ranks.
struct Part {
  struct Types {
    DType gradient = DType::kFloat32;
    DType sum = DType::kFloat32;
    DType parameter = DType::kFloat32;
  };

  Types types;
  std::vector<std::size_t> counts;  // elements of each rank; replicated: one number, of all ranks
  bool replicated = false;
  unsigned absent = 0;  // bit r: rank r has no gradient

  std::size_t numel() const;
  bool is_present(int rank) const { return (absent >> rank & 1U) == 0; }
};

/// What the tests compute with.
inline constexpr std::array kTypes{
    Part::Types{},
    Part::Types{DType::kBFloat16, DType::kFloat32, DType::kBFloat16},
    Part::Types{DType::kBFloat16, DType::kBFloat16, DType::kBFloat16},
    Part::Types{DType::kFloat64, DType::kFloat64, DType::kFloat64},
    Part::Types{DType::kFloat32, DType::kFloat64, DType::kFloat32},
};

/// `elements` at rank `at`, a few or none at each other.
std::vector<std::size_t> counts_of(int size, std::size_t elements, int at);

/// `count` parts of few elements and all types, which some or all ranks have no gradient of.
std::vector<Part> small_parts(int size, std::size_t count, int salt);

/// All ranks' tensors, and the same after `parameter -= average`, one element at a time.
struct Plan {
  Plan(int world, double times, std::vector<Part> all, int salt);
  /// Whether any rank has a gradient of the part.
  bool has_any(std::size_t part) const;

  int size;
  double factor;
  std::vector<Part> parts;
  std::vector<std::vector<Bytes>> gradients;  // [part][rank]; zeros: it is absent
  std::vector<Bytes> before;                  // [part], the parameter; likewise:
  std::vector<Bytes> average;
  std::vector<Bytes> after;

 private:
  Bytes average_of(const Part& part, const std::vector<Bytes>& of_ranks) const;
};

/// One rank's tensors in its heap, with a gap around each, and its averages. All of this memory is
/// compared with what it should be, the gaps included. Made on the rank's own thread.
class Tensors {
 public:
  Tensors(const Plan& plan, int rank);
  /// Restores the tensors as they were before all passes.
  void reset();

  std::vector<ShardedPart> parts(bool reads, bool writes) const;
  std::byte* average(std::size_t part) { return averages_[part].data(); }

  /// Each throws unless all bits are right.
  void require_unchanged() const { compare(before_, "before"); }
  void require_stepped() const { compare(after_, "after"); }
  void require_averages() const;

 private:
  std::size_t add(const Bytes& tensor, DType type, std::size_t number);
  void compare(const Bytes& want, const char* when) const;

  const Plan& plan_;
  int rank_;
  Bytes before_;  // all memory
  Bytes after_;
  std::vector<std::size_t> gradients_;  // where each begins; parameters_ likewise
  std::vector<std::size_t> parameters_;
  std::vector<std::size_t> begins_;  // this rank's elements; counts_ likewise
  std::vector<std::size_t> counts_;
  std::vector<Bytes> averages_;  // not in the heap
  std::shared_ptr<std::byte> memory_;
};

/// The optimizer of these tests: parameter -= average. A pass that only reads keeps the averages
/// for one that only writes.
class Subtraction final : public ShardedPass {
 public:
  Subtraction(const Plan& plan, Tensors& tensors, bool reads, bool writes);

  int size() const { return plan_.size; }
  std::span<const ShardedPart> parts() const override { return parts_; }
  bool reads() const override { return reads_; }
  bool writes() const override { return writes_; }
  double factor() const override { return plan_.factor; }
  void apply(std::size_t number, std::size_t begin, std::size_t count,
             const std::byte* average) override;
  void touch(std::size_t number) override { ++touched_[number]; }

  /// Each throws unless it is so.
  void require_complete() const;
  void require_not_begun() const;

  std::function<void()> in_apply;  // called at the start of each apply(); may be empty

 private:
  const Plan& plan_;
  Tensors& tensors_;
  bool reads_;
  bool writes_;
  std::vector<ShardedPart> parts_;
  std::vector<int> touched_;
  std::vector<std::size_t> done_;
};

/// The call as the backend makes it. The pass must outlive it.
Request request_of(Subtraction& pass,
                   Clock::time_point deadline = Clock::now() + std::chrono::seconds(60));

using Run = std::function<void(const Request&)>;
inline Run run_on(Communicator& comm) {
  return [&comm](const Request& request) { comm.run(request); };
}

/// Runs one pass, with random pauses in apply(). Throws unless it was complete.
void run_pass(const Plan& plan, Tensors& tensors, bool reads, bool writes, const Run& run,
              int delays = 0);

/// Steps all parameters: in one pass or, `split`, in one that reads and one that writes. Throws
/// unless all bits are right.
void step(const Plan& plan, Tensors& tensors, bool split, const Run& run, int delays = 0);

}  // namespace dreamcomm::testing
