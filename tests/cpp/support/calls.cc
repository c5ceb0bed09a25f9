#include "cpp/support/calls.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>

#include "core/half.h"
#include "cpp/support/ranks.h"
#include "kernels/reduce.h"

namespace dreamcomm::testing {
namespace {

double element(std::size_t index, int rank, int block, int salt) {
  const auto mixed = (index + 1) * 2654435761U + static_cast<std::size_t>(rank) * 40503U +
                     static_cast<std::size_t>(block) * 9176U + static_cast<std::size_t>(salt);
  return static_cast<double>((mixed >> 7) % 1000) / 37.0 + 0.1;
}

template <typename T>
void put(Bytes& bytes, std::size_t index, T value) {
  std::memcpy(bytes.data() + index * sizeof value, &value, sizeof value);
}

void put_element(Bytes& bytes, DType dtype, std::size_t i, double value) {
  switch (dtype) {
    case DType::kFloat64:
      return put(bytes, i, value);
    case DType::kFloat32:
      return put(bytes, i, static_cast<float>(value));
    case DType::kInt64:
      return put(bytes, i, static_cast<std::int64_t>(value));
    case DType::kInt32:
      return put(bytes, i, static_cast<std::int32_t>(value));
    case DType::kBool:
      return put(bytes, i, static_cast<std::uint8_t>(static_cast<int>(value) % 2));
    case DType::kBFloat16:
    case DType::kFloat16:  // any pattern with a small exponent will do
      return put(bytes, i, static_cast<std::uint16_t>(0x3c00 + static_cast<int>(value * 30)));
    default:
      return put(bytes, i, static_cast<std::uint8_t>(value));
  }
}

/// Each rank's blocks as all ranks can compute them.
class Inputs {
 public:
  explicit Inputs(const Case& one) : one_(one) {}
  Bytes block(int rank, int index) const {
    return make_block(one_.dtype, size_of(rank, index), rank, index, one_.salt);
  }
  /// Elements: equal everywhere but in all_to_all, where every pair differs.
  std::size_t size_of(int rank, int index) const {
    if (one_.kind != Kind::kAllToAll) return one_.count;
    return (one_.count * static_cast<std::size_t>(1 + (rank + 2 * index) % 3)) / 2;
  }

 private:
  const Case& one_;
};

Bytes fold(const Reduction& how, const std::vector<Bytes>& blocks, std::size_t count) {
  std::vector<const std::byte*> sources;
  for (const Bytes& block : blocks) sources.push_back(block.data());
  Bytes result(blocks[0].size());
  reduce(how, sources, result.data(), count);
  return result;
}

Bytes widened(const Bytes& halves, float (*to_float)(std::uint16_t)) {
  Bytes wide(halves.size() * 2);
  for (std::size_t i = 0; i < halves.size() / 2; ++i) {
    std::uint16_t half = 0;
    std::memcpy(&half, halves.data() + i * 2, 2);
    put(wide, i, to_float(half));
  }
  return wide;
}

Bytes narrowed(const Bytes& wide, std::uint16_t (*to_half)(float)) {
  Bytes halves(wide.size() / 2);
  for (std::size_t i = 0; i < wide.size() / 4; ++i) {
    float value = 0;
    std::memcpy(&value, wide.data() + i * 4, 4);
    put(halves, i, to_half(value));
  }
  return halves;
}

/// Host by host, halves in float32 until the end.
Bytes reduced_by_hosts(const Case& one, Reduction how, const std::vector<Bytes>& blocks) {
  const bool float16 = how.dtype == DType::kFloat16;
  const bool halves = float16 || how.dtype == DType::kBFloat16;
  Reduction here = how;
  if (halves) here.dtype = DType::kFloat32;
  Reduction between = here;
  if (how.op == ReduceOp::kAvg) here.op = ReduceOp::kSum;
  if (how.op == ReduceOp::kPremulSum) between.op = ReduceOp::kSum;
  std::vector<Bytes> of_hosts;
  for (const std::vector<int>& host : *one.hosts) {
    std::vector<Bytes> own;
    for (const int rank : host) {
      const Bytes& block = blocks[static_cast<std::size_t>(rank)];
      own.push_back(halves ? widened(block, float16 ? float16_to_float : bfloat16_to_float)
                           : block);
    }
    of_hosts.push_back(fold(here, own, one.count));
  }
  const Bytes all = fold(between, of_hosts, one.count);
  return halves ? narrowed(all, float16 ? float_to_float16 : float_to_bfloat16) : all;
}

Bytes reduced(const Case& one, int size, int index) {
  const Inputs inputs(one);
  std::vector<Bytes> blocks;
  for (int rank = 0; rank < size; ++rank) blocks.push_back(inputs.block(rank, index));
  const int divisor = one.op == ReduceOp::kAvg ? size : 1;
  const Reduction how{
      .dtype = one.dtype, .op = one.op, .factor = 2.0, .divisor = static_cast<double>(divisor)};
  return one.hosts ? reduced_by_hosts(one, how, blocks) : fold(how, blocks, one.count);
}

struct Plan {
  std::vector<Bytes> in;
  std::vector<Bytes> want;  // one per output block
};

Plan plan(const Case& one, int rank, int size) {
  const Inputs inputs(one);
  const bool root = rank == one.root;
  Plan result;
  const auto give = [&](int blocks) {
    for (int i = 0; i < blocks; ++i) result.in.push_back(inputs.block(rank, i));
  };
  switch (one.kind) {
    case Kind::kBroadcast:
      give(root ? 1 : 0);
      result.want.push_back(inputs.block(one.root, 0));
      break;
    case Kind::kAllReduce:
    case Kind::kReduce:
      give(1);
      if (root || one.kind == Kind::kAllReduce) result.want.push_back(reduced(one, size, 0));
      break;
    case Kind::kAllGather:
    case Kind::kGather:
      give(1);
      for (int peer = 0; peer < size && (root || one.kind == Kind::kAllGather); ++peer) {
        result.want.push_back(inputs.block(peer, 0));
      }
      break;
    case Kind::kScatter:
      give(root ? size : 0);
      result.want.push_back(inputs.block(one.root, rank));
      break;
    case Kind::kReduceScatter:
      give(size);
      result.want.push_back(reduced(one, size, rank));
      break;
    case Kind::kAllToAll:
      give(size);
      for (int peer = 0; peer < size; ++peer) result.want.push_back(inputs.block(peer, rank));
      break;
    default:
      break;
  }
  return result;
}

/// Memory of blocks that follow each other, in the rank's heap or not.
class Memory {
 public:
  Memory(const std::vector<Bytes>& contents, bool in_heap) {
    std::size_t total = 0;
    for (const Bytes& bytes : contents) total += bytes.size();
    if (in_heap) {
      shared_ = own_heap()->allocate(total);
      require(shared_ != nullptr, "the heap is full");
    } else {
      private_.resize(total);
    }
    std::byte* at = in_heap ? shared_.get() : private_.data();
    for (const Bytes& bytes : contents) {
      std::copy(bytes.begin(), bytes.end(), at);
      blocks_.push_back({at, bytes.size()});
      at += bytes.size();
    }
  }
  const std::vector<Block>& blocks() const { return blocks_; }

 private:
  std::shared_ptr<std::byte> shared_;
  Bytes private_;
  std::vector<Block> blocks_;
};

bool is_in_heap(const Case& one, int rank) {
  return one.place == Place::kHeap || (one.place == Place::kMixed && (rank + one.salt) % 3 != 0);
}

}  // namespace

Bytes make_block(DType dtype, std::size_t count, int rank, int block, int salt) {
  Bytes bytes(count * item_size(dtype));
  const std::size_t parts = is_complex(dtype) ? 2 : 1;
  const DType part = dtype == DType::kComplex64    ? DType::kFloat32
                     : dtype == DType::kComplex128 ? DType::kFloat64
                                                   : dtype;
  for (std::size_t i = 0; i < count * parts; ++i) {
    put_element(bytes, part, i, element(i, rank, block, salt));
  }
  return bytes;
}

void run_case_by(const Case& one, int rank, int size,
                 const std::function<void(const Request&)>& run) {
  const Plan the = plan(one, rank, size);
  std::vector<Bytes> blank;
  for (const Bytes& want : the.want) blank.emplace_back(want.size(), std::byte{0xA5});
  const Memory in(the.in, is_in_heap(one, rank));
  const Memory out(blank, is_in_heap(one, rank));
  const std::vector<Block>& ins = in.blocks();
  const bool in_place = one.in_place && ins.size() == 1 && blank.size() == 1;
  const std::vector<Block>& outs = in_place ? ins : out.blocks();
  const int divisor = one.op == ReduceOp::kAvg ? size : 1;
  Request request;
  request.kind = one.kind;
  request.reduction = {
      .dtype = one.dtype, .op = one.op, .factor = 2.0, .divisor = static_cast<double>(divisor)};
  request.in = ins;
  request.out = outs;
  request.root = one.root;
  request.deadline = Clock::now() + std::chrono::seconds(60);
  run(request);
  for (std::size_t i = 0; i < outs.size(); ++i) {
    const bool same =
        outs[i].bytes == 0 || std::memcmp(outs[i].data, the.want[i].data(), outs[i].bytes) == 0;
    require(same, to_string(one) + ": block " + std::to_string(i) + " has other bits");
  }
}

void run_case(Communicator& comm, const Case& one) {
  run_case_by(one, comm.rank(), comm.size(), [&](const Request& request) { comm.run(request); });
}

void run_case_in_job(Communicator& comm, const Case& one) {
  run_case_by(one, comm.rank(), comm.size(),
              [&](const Request& request) { comm.run_ordered(request); });
}

std::string to_string(const Case& one) {
  return concat(name(one.kind), '(', name(one.op), ", ", one.count, " x ", name(one.dtype),
                ", root ", one.root, one.in_place ? ", in place)" : ")");
}

}  // namespace dreamcomm::testing
