#include "gpu/choice.h"

#include <algorithm>

#include "core/schedule.h"

namespace dreamcomm::gpu {
namespace {

// Of a device with 2 TB/s; a turn is a store and a load across the memory of two kernels.
constexpr double kTurn = 4e-6;
constexpr double kPerByte = 0.5e-12;

/// Less is not worth a block's turns.
constexpr std::size_t kBlockBytes = std::size_t{16} << 10;

}  // namespace

double expected_seconds(RowId row, std::size_t bytes, int size) {
  const auto n = static_cast<double>(size);
  const auto s = static_cast<double>(bytes);
  if (row == RowId::kTwoShot) return 2 * kTurn + (5 * n - 2) / n * s * kPerByte;
  return kTurn + (n + 3) * s * kPerByte;
}

Choice choose(const Question& question) {
  Choice choice;
  const bool in_two = question.kind == Kind::kAllReduce || question.kind == Kind::kReduce;
  const bool shorter = expected_seconds(RowId::kTwoShot, question.bytes, question.size) <
                       expected_seconds(RowId::kStaged, question.bytes, question.size);
  if (in_two && question.size > 1 && (question.kind == Kind::kReduce || shorter)) {
    choice.row = RowId::kTwoShot;
  }
  const std::size_t worth = std::max<std::size_t>(1, chunks(question.bytes, kBlockBytes));
  // The sizes of all_to_all differ among the ranks, so they cannot tell.
  const bool all = question.kind == Kind::kAllToAll;
  const auto most = static_cast<std::size_t>(question.most_blocks);
  choice.grid.blocks = static_cast<int>(all ? most : std::min(worth, most));
  choice.grid.lanes = question.lanes;
  return choice;
}

}  // namespace dreamcomm::gpu
