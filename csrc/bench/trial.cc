#include "bench/trial.h"

#include <array>
#include <chrono>
#include <cstring>

#include "core/error.h"
#include "core/half.h"

namespace dreamcomm {
namespace {

template <typename T>
void fill(const Block& block, T value) {
  // NOLINTNEXTLINE(bugprone-float-loop-counter): a size counts, although the value may be a float
  for (std::size_t at = 0; at + sizeof value <= block.bytes; at += sizeof value) {
    std::memcpy(block.data + at, &value, sizeof value);
  }
}

/// Sets every element to `number`.
void rewrite(DType dtype, const Block& block, int number) {
  switch (dtype) {
    case DType::kFloat16:
      return fill(block, float_to_float16(static_cast<float>(number)));
    case DType::kBFloat16:
      return fill(block, float_to_bfloat16(static_cast<float>(number)));
    case DType::kFloat32:
      return fill(block, static_cast<float>(number));
    case DType::kFloat64:
      return fill(block, static_cast<double>(number));
    case DType::kUInt16:
    case DType::kInt16:
      return fill(block, static_cast<std::int16_t>(number));
    case DType::kUInt32:
    case DType::kInt32:
      return fill(block, static_cast<std::int32_t>(number));
    case DType::kUInt64:
    case DType::kInt64:
      return fill(block, static_cast<std::int64_t>(number));
    case DType::kComplex64:
      return fill(block, std::array<float, 2>{static_cast<float>(number), 0});
    case DType::kComplex128:
      return fill(block, std::array<double, 2>{static_cast<double>(number), 0});
    default:
      return fill(block, static_cast<std::int8_t>(dtype == DType::kBool ? 1 : number));
  }
}

std::vector<Block> split(const Block& row, std::size_t parts) {
  std::vector<Block> blocks;
  const std::size_t bytes = row.bytes / parts;
  for (std::size_t i = 0; i < parts; ++i) blocks.push_back({row.data + i * bytes, bytes});
  return blocks;
}

struct Blocks {
  std::vector<Block> in;
  std::vector<Block> out;
};

/// The blocks that rank `rank` of `size` passes to a call on these rows.
Blocks blocks_of(Kind kind, int rank, std::size_t size, const Block& in, const Block& out) {
  const bool root = rank == 0;
  switch (kind) {
    case Kind::kBarrier:
      return {};
    case Kind::kBroadcast:
      return {root ? split(in, 1) : std::vector<Block>{}, split(out, 1)};
    case Kind::kReduce:
      return {split(in, 1), root ? split(out, 1) : std::vector<Block>{}};
    case Kind::kAllReduce:
      return {split(in, 1), split(out, 1)};
    case Kind::kAllGather:
      return {split(in, 1), split(out, size)};
    case Kind::kReduceScatter:
      return {split(in, size), split(out, 1)};
    case Kind::kAllToAll:
      return {split(in, size), split(out, size)};
    default:
      throw Error(ErrorKind::kInvalid, concat("no benchmark of ", name(kind), " on the bare core"));
  }
}

bool reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}

}  // namespace

void check_blocks(const Communicator& communicator, const Trial& trial) {
  const auto size = static_cast<std::size_t>(communicator.size());
  const Block in = trial.row(trial.in, 0);
  const Block out = trial.row(trial.out, 0);
  // Throws for kinds that have no benchmark.
  blocks_of(trial.kind, communicator.rank(), size, in, out);
  const std::size_t gives = trial.kind == Kind::kAllGather ? size : 1;
  const std::size_t takes = trial.kind == Kind::kReduceScatter ? size : 1;
  const std::size_t parts = trial.kind == Kind::kAllToAll ? size : 1;
  check(in.bytes * gives == out.bytes * takes && in.bytes % (parts * item_size(trial.dtype)) == 0,
        ErrorKind::kInvalid, name(trial.kind), " of ", size, " ranks cannot have rows of ",
        in.bytes, " bytes in and ", out.bytes, " bytes out");
  check(!reduces(trial.kind) || !only_moves(trial.dtype), ErrorKind::kInvalid, name(trial.kind),
        " cannot add elements of this type");
}

std::vector<double> time_rows(Communicator& communicator, const Trial& trial,
                              const std::function<void(std::size_t index)>& call) {
  const Request barrier;  // a barrier
  std::vector<double> seconds;
  seconds.reserve(trial.rows * static_cast<std::size_t>(trial.samples));
  for (int sample = 0; sample < trial.samples; ++sample) {
    if (!trial.in_place()) rewrite(trial.dtype, trial.out, 0);
    rewrite(trial.dtype, trial.in, communicator.rank() + 1);
    communicator.run(barrier, trial.interrupt);
    for (std::size_t index = 0; index < trial.rows; ++index) {
      const auto begin = Clock::now();
      call(index);
      seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    }
  }
  return seconds;
}

std::vector<double> time_core(Communicator& communicator, const Trial& trial) {
  check_blocks(communicator, trial);
  const auto size = static_cast<std::size_t>(communicator.size());
  std::vector<Blocks> rows;
  for (std::size_t i = 0; i < trial.rows; ++i) {
    rows.push_back(blocks_of(trial.kind, communicator.rank(), size, trial.row(trial.in, i),
                             trial.row(trial.out, i)));
  }
  Request request;
  request.kind = trial.kind;
  request.reduction.dtype = trial.dtype;
  if (reduces(trial.kind)) request.reduction.op = ReduceOp::kSum;
  return time_rows(communicator, trial, [&](std::size_t index) {
    request.in = rows[index].in;
    request.out = rows[index].out;
    communicator.run(request, trial.interrupt);
  });
}

}  // namespace dreamcomm
