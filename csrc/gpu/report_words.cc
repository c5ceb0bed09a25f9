#include "gpu/report_words.h"

#include <iomanip>
#include <sstream>

#include "core/request.h"

namespace dreamcomm::gpu {
namespace {

std::string what_is_missing(const Report& report) {
  const std::string place = concat(" in turn ", report.turn + 1, " of the call");
  return report.turn == 0 ? concat("rank ", report.missing, ", which has not come to this call")
                          : concat("rank ", report.missing, place);
}

}  // namespace

std::string describe(const CallCard& card) {
  const dreamcomm::Block block{nullptr, static_cast<std::size_t>(card.bytes)};
  Request request;
  request.kind = card.kind;
  request.reduction = {.dtype = card.dtype, .op = card.op};
  request.root = card.root;
  if (card.kind == Kind::kAllToAll) return std::string(name(card.kind));
  if (card.kind != Kind::kBarrier) request.in = std::span(&block, 1);
  return dreamcomm::describe(request);
}

Error error_of(const Report& report, int size) {
  const std::string who = concat(describe(report.card), " on rank ", report.rank, " of ", size,
                                 " (call ", report.sequence, " on GPUs)");
  switch (report.reason) {
    case Report::kTimeout: {
      std::ostringstream waited;
      waited << std::fixed << std::setprecision(1) << static_cast<double>(report.patience_ns) * 1e-9
             << " s";
      return {ErrorKind::kTimeout, concat(who, " reached its timeout after ", waited.str(),
                                          " of waiting for ", what_is_missing(report))};
    }
    case Report::kPeerGone:
      return {ErrorKind::kPeerLost,
              report.missing == report.rank
                  ? concat(who, " was not run: an earlier call of this group failed here")
                  : concat(who, " cannot finish: rank ", report.missing,
                           " has given the group up; its own error says why")};
    case Report::kMismatch:
      return {ErrorKind::kMismatch,
              concat(who, ": rank ", report.missing,
                     " made another call (operation, reduction, dtype, size or root differ). "
                     "Ranks must make the same calls in the same order; no data was moved, and the "
                     "group takes no more tensors on GPUs")};
    case Report::kSizes:
      return {ErrorKind::kMismatch,
              concat(who, ": rank ", report.missing, " gives rank ", report.taker, ' ',
                     report.given, " bytes, which expects ", report.expected,
                     "; no data was moved, and the group takes no more tensors on GPUs")};
    default:
      return {ErrorKind::kAborted, concat(who, " was ended by abort()")};
  }
}

}  // namespace dreamcomm::gpu
