#include "cpp/support/sharded_plan.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/half.h"
#include "cpp/support/naive_reduce.h"
#include "cpp/support/ranks.h"

namespace dreamcomm::testing {
namespace {

constexpr std::byte kGap{0xA5};  // what lies between tensors
constexpr std::size_t kGapBytes = 64;

double read(DType type, const std::byte* from) {
  switch (type) {
    case DType::kFloat64:
      return naive::load<double>(from);
    case DType::kFloat32:
      return naive::load<float>(from);
    default:
      return bfloat16_to_float(naive::load<std::uint16_t>(from));
  }
}

template <typename T>
void put(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

void write(DType type, double value, std::byte* to) {
  switch (type) {
    case DType::kFloat64:
      return put(to, value);
    case DType::kFloat32:
      return put(to, static_cast<float>(value));
    default:
      return put(to, float_to_bfloat16(static_cast<float>(value)));
  }
}

void subtract(const Part::Types& types, std::byte* parameter, const std::byte* average,
              std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    std::byte* const at = parameter + i * item_size(types.parameter);
    const double by = read(types.sum, average + i * item_size(types.sum));
    write(types.parameter, read(types.parameter, at) - by, at);
  }
}

Bytes converted(const Bytes& from, DType type, DType to) {
  const std::size_t count = from.size() / item_size(type);
  Bytes result(count * item_size(to));
  for (std::size_t i = 0; i < count; ++i) {
    write(to, read(type, from.data() + i * item_size(type)), result.data() + i * item_size(to));
  }
  return result;
}

/// In float32, unless the type is wider.
void multiply(Bytes& numbers, DType type, double factor) {
  const std::size_t item = item_size(type);
  for (std::size_t i = 0; i < numbers.size(); i += item) {
    std::byte* const at = numbers.data() + i;
    const double value = read(type, at);
    const bool wide = type == DType::kFloat64;
    write(type,
          wide ? value * factor
               : double{naive::rounded(static_cast<float>(value) * static_cast<float>(factor))},
          at);
  }
}

}  // namespace

std::size_t Part::numel() const {
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

std::vector<std::size_t> counts_of(int size, std::size_t elements, int at) {
  std::vector<std::size_t> counts;
  for (int rank = 0; rank < size; ++rank) {
    const auto few = static_cast<std::size_t>((rank + at) % 3) * 5;
    counts.push_back(rank == at % size ? elements : few);
  }
  return counts;
}

std::vector<Part> small_parts(int size, std::size_t count, int salt) {
  std::vector<Part> parts;
  for (std::size_t i = 0; i < count; ++i) {
    const int number = static_cast<int>(i) + salt;
    Part& part = parts.emplace_back();
    part.types = kTypes[static_cast<std::size_t>(number) % kTypes.size()];
    part.replicated = number % 5 == 2;
    part.counts = part.replicated ? std::vector<std::size_t>{1} : counts_of(size, 3, number);
    part.absent = number % 7 == 3 ? ~0U : number % 3 == 1 ? 1U << (number % size) : 0;
  }
  return parts;
}

Plan::Plan(int world, double times, std::vector<Part> all, int salt)
    : size(world), factor(times), parts(std::move(all)) {
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    const int number = static_cast<int>(i);
    std::vector<Bytes>& of_ranks = gradients.emplace_back();
    for (int rank = 0; rank < size; ++rank) {
      of_ranks.push_back(part.is_present(rank)
                             ? make_block(part.types.gradient, part.numel(), rank, number, salt)
                             : Bytes(part.numel() * item_size(part.types.gradient)));
    }
    before.push_back(make_block(part.types.parameter, part.numel(), size, number, salt));
    average.push_back(average_of(part, of_ranks));
    after.push_back(before.back());
    if (has_any(i)) subtract(part.types, after[i].data(), average[i].data(), part.numel());
  }
}

bool Plan::has_any(std::size_t part) const {
  for (int rank = 0; rank < size; ++rank) {
    if (parts[part].is_present(rank)) return true;
  }
  return false;
}

Bytes Plan::average_of(const Part& part, const std::vector<Bytes>& of_ranks) const {
  const Part::Types& types = part.types;
  std::vector<Bytes> wide;
  std::vector<const std::byte*> operands;
  for (const Bytes& one : of_ranks) wide.push_back(converted(one, types.gradient, types.sum));
  for (const Bytes& one : wide) operands.push_back(one.data());
  Bytes result(wide[0].size());
  const ReduceOp op = factor == 0 ? ReduceOp::kAvg : ReduceOp::kSum;
  naive::reduce({.dtype = types.sum, .op = op, .divisor = static_cast<double>(size)}, operands,
                result.data(), part.numel());
  if (factor != 0) multiply(result, types.sum, factor);
  return result;
}

Tensors::Tensors(const Plan& plan, int rank) : plan_(plan), rank_(rank) {
  before_.resize(static_cast<std::size_t>(rank % 3) * 40, kGap);  // elsewhere on each rank
  for (std::size_t i = 0; i < plan.parts.size(); ++i) {
    const Part& part = plan.parts[i];
    const Bytes& gradient = plan.gradients[i][static_cast<std::size_t>(rank)];
    gradients_.push_back(part.is_present(rank) ? add(gradient, part.types.gradient, i) : 0);
    parameters_.push_back(add(plan.before[i], part.types.parameter, i));
    const auto first = part.counts.begin();
    begins_.push_back(part.replicated ? 0 : std::accumulate(first, first + rank, std::size_t{0}));
    counts_.push_back(first[part.replicated ? 0 : rank]);
    averages_.emplace_back(counts_[i] * item_size(part.types.sum));
  }
  before_.resize(before_.size() + kGapBytes, kGap);
  after_ = before_;
  for (std::size_t i = 0; i < plan.parts.size(); ++i) {
    std::copy(plan.after[i].begin(), plan.after[i].end(), after_.data() + parameters_[i]);
  }
  memory_ = own_heap()->allocate(before_.size());
  require(memory_ != nullptr, "the heap is full");
  reset();
}

void Tensors::reset() {
  std::copy(before_.begin(), before_.end(), memory_.get());
  for (Bytes& average : averages_) std::fill(average.begin(), average.end(), kGap);
}

std::vector<ShardedPart> Tensors::parts(bool reads, bool writes) const {
  std::vector<ShardedPart> result;
  for (std::size_t i = 0; i < plan_.parts.size(); ++i) {
    const Part& part = plan_.parts[i];
    ShardedPart& one = result.emplace_back();
    one.present = part.is_present(rank_);
    if (reads && one.present) one.gradient = memory_.get() + gradients_[i];
    if (writes) one.parameter = memory_.get() + parameters_[i];
    one.gradient_type = part.types.gradient;
    one.sum_type = part.types.sum;
    one.parameter_type = part.types.parameter;
    one.numel = part.numel();
    one.begin = begins_[i];
    one.count = counts_[i];
    one.replicated = part.replicated;
  }
  return result;
}

void Tensors::require_averages() const {
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    if (!plan_.has_any(i)) continue;
    const std::byte* const want =
        plan_.average[i].data() + begins_[i] * item_size(plan_.parts[i].types.sum);
    require(std::equal(averages_[i].begin(), averages_[i].end(), want),
            concat("rank ", rank_, " has another average of part ", i));
  }
}

/// Returns where the tensor begins. Not all are aligned to more than their elements.
std::size_t Tensors::add(const Bytes& tensor, DType type, std::size_t number) {
  const std::size_t at = (before_.size() + kGapBytes + 7) / 8 * 8 + number % 2 * item_size(type);
  before_.resize(at, kGap);
  before_.insert(before_.end(), tensor.begin(), tensor.end());
  return at;
}

void Tensors::compare(const Bytes& want, const char* when) const {
  const auto here = std::mismatch(want.begin(), want.end(), memory_.get()).first;
  if (here == want.end()) return;
  const auto at = static_cast<std::size_t>(here - want.begin());
  std::size_t part = 0;
  while (part + 1 < parameters_.size() && parameters_[part] + plan_.before[part].size() <= at) {
    ++part;
  }
  require(false, concat("rank ", rank_, " of ", plan_.size, " has other bytes than ", when,
                        " the pass, from ", at, " of ", want.size(), " on; the parameter of part ",
                        part, " begins at ", parameters_[part]));
}

Subtraction::Subtraction(const Plan& plan, Tensors& tensors, bool reads, bool writes)
    : plan_(plan),
      tensors_(tensors),
      reads_(reads),
      writes_(writes),
      parts_(tensors.parts(reads, writes)),
      touched_(parts_.size()),
      done_(parts_.size()) {}

void Subtraction::apply(std::size_t number, std::size_t begin, std::size_t count,
                        const std::byte* average) {
  if (in_apply) in_apply();
  const ShardedPart& part = parts_[number];
  require(touched_[number] == 1, "apply() before touch()");
  require(count > 0 && count <= kTile, "a tile of another size");
  require(begin == part.begin + done_[number], "tiles do not follow each other");
  require((average != nullptr) == reads_, "an average in a pass that does not read, or none");
  const std::size_t item = item_size(part.sum_type);
  std::byte* const own = tensors_.average(number) + done_[number] * item;
  if (reads_) std::memcpy(own, average, count * item);
  done_[number] += count;
  if (!writes_) return;
  subtract(plan_.parts[number].types, part.parameter + begin * item_size(part.parameter_type), own,
           count);
}

void Subtraction::require_complete() const {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const bool any = plan_.has_any(i);
    require(touched_[i] == (any ? 1 : 0), concat("touch(", i, "): ", touched_[i], " times"));
    require(done_[i] == (any ? parts_[i].count : 0), concat("part ", i, " is incomplete"));
  }
}

void Subtraction::require_not_begun() const {
  for (const int touched : touched_) require(touched == 0, "a pass that failed has begun");
}

Request request_of(Subtraction& pass, Clock::time_point deadline) {
  Request request;
  request.kind = !pass.writes() ? Kind::kReduceScatter
                 : pass.reads() ? Kind::kAllReduce
                                : Kind::kAllGather;
  request.pass = &pass;
  request.reduction.divisor = pass.size();
  request.deadline = deadline;
  return request;
}

void run_pass(const Plan& plan, Tensors& tensors, bool reads, bool writes, const Run& run,
              int delays) {
  Subtraction pass(plan, tensors, reads, writes);
  if (delays > 0) pass.in_apply = [delays] { pause(delays); };
  run(request_of(pass));
  pass.require_complete();
}

void step(const Plan& plan, Tensors& tensors, bool split, const Run& run, int delays) {
  if (split) {
    run_pass(plan, tensors, true, false, run, delays);
    tensors.require_unchanged();
    tensors.require_averages();
    run_pass(plan, tensors, false, true, run, delays);
  } else {
    run_pass(plan, tensors, true, true, run, delays);
    tensors.require_averages();
  }
  tensors.require_stepped();
}

}  // namespace dreamcomm::testing
