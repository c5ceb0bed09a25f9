#include "gpu/host/select_algorithm.h"

#include <algorithm>

#include "core/schedule.h"

namespace dreamcomm::gpu {
namespace {

/// Fewer bytes do not justify a block's turns.
constexpr std::size_t kBlockBytes = std::size_t{16} << 10;

}  // namespace

double expected_seconds(AlgorithmId row, const Question& question) {
  const auto n = static_cast<double>(question.size);
  const double turn = question.costs.turn;
  const double all = static_cast<double>(question.bytes) * question.costs.per_byte;
  switch (row) {
    case AlgorithmId::kTwoShot:
      return 2 * turn + (5 * n - 2) / n * all;
    case AlgorithmId::kFlagged:  // no fence, no load after it, and all ranks in parallel
      return turn / 2 + 2 * n * all;
    case AlgorithmId::kPush:
    case AlgorithmId::kPull:
      return 2 * turn + 2 * all;
    case AlgorithmId::kRing:
      return 2 * (n - 1) * turn + (6 * n - 4) / n * all;
    default:
      return turn + (n + 3) * all;
  }
}

namespace {

/// On registered tensors a row needs one more turn, in which the ranks learn which tensors are
/// registered, and saves the copies. If some rank's are not registered, that turn is wasted.
AlgorithmId row_for(const Question& question) {
  const bool reduces = question.kind == Kind::kAllReduce || question.kind == Kind::kReduce;
  if (question.size == 1) return AlgorithmId::kStaged;
  const bool needs_memory = question.asked == AlgorithmId::kPush;
  if (question.kind == Kind::kAllReduce && question.asked &&
      (question.registered || !needs_memory)) {
    return *question.asked;
  }
  if (!reduces) {
    const double saved = static_cast<double>(question.bytes) * question.costs.per_byte;
    const bool pays = saved > question.costs.turn;
    return question.registered && pays ? AlgorithmId::kInPlace : AlgorithmId::kStaged;
  }
  const auto seconds = [&](AlgorithmId row) { return expected_seconds(row, question); };
  AlgorithmId staged = question.kind == Kind::kReduce ||
                               seconds(AlgorithmId::kTwoShot) < seconds(AlgorithmId::kStaged)
                           ? AlgorithmId::kTwoShot
                           : AlgorithmId::kStaged;
  const bool fits = fits_packets(question.bytes, std::min(question.most_blocks, kPacketBlocks)) &&
                    question.kind == Kind::kAllReduce;
  if (fits && seconds(AlgorithmId::kFlagged) < seconds(staged)) staged = AlgorithmId::kFlagged;
  return question.registered && seconds(AlgorithmId::kPush) < seconds(staged) ? AlgorithmId::kPush
                                                                              : staged;
}

}  // namespace

Choice choose(const Question& question) {
  Choice choice;
  choice.row = row_for(question);
  const std::size_t each = choice.row == AlgorithmId::kFlagged ? kBytesByPackets / 2 : kBlockBytes;
  const std::size_t worth = std::max<std::size_t>(1, chunks(question.bytes, each));
  // The sizes of all_to_all differ among the ranks, so they cannot decide the number of blocks.
  const bool all = question.kind == Kind::kAllToAll;
  const auto most = static_cast<std::size_t>(choice.row == AlgorithmId::kFlagged
                                                 ? std::min(question.most_blocks, kPacketBlocks)
                                                 : question.most_blocks);
  choice.grid.blocks = static_cast<int>(all ? most : std::min(worth, most));
  choice.grid.lanes = question.lanes;
  return choice;
}

}  // namespace dreamcomm::gpu
