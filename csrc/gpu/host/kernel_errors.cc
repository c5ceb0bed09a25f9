#include "gpu/host/kernel_errors.h"

#include <iomanip>
#include <sstream>

#include "core/request.h"

namespace dreamcomm::gpu {
namespace {

std::string what_is_missing(const Report& report, const PeerReports& peer_reports) {
  const std::string does = peer_reports.does ? peer_reports.does(report.missing) : "";
  return concat("rank ", report.missing,
                report.turn == 0 ? std::string(", which has not entered this call")
                                 : concat(" in turn ", report.turn + 1, " of the call"),
                does.empty() ? "" : "; ", does);
}

std::string lost_to(const PeerReports& peer_reports) {
  return peer_reports.lost ? peer_reports.lost() : "";
}

std::string other_call(const Report& report) {
  if (report.has_theirs == 0) return " (operation, reduction, dtype, size or root differ)";
  const std::string theirs = describe(report.theirs);
  const bool alike = theirs == describe(report.info);
  return concat(": ", theirs, alike ? ", in another way (options differ)" : "");
}

}  // namespace

std::string describe(const CallInfo& info) {
  const dreamcomm::Block block{nullptr, static_cast<std::size_t>(info.bytes)};
  Request request;
  request.kind = info.kind;
  request.reduction = {.dtype = info.dtype, .op = info.op};
  request.root = info.root;
  if (info.kind == Kind::kAllToAll) return std::string(name(info.kind));
  if (info.kind != Kind::kBarrier) request.in = std::span(&block, 1);
  return dreamcomm::describe(request);
}

Error error_of(const Report& report, int size, const PeerReports& peer_reports) {
  const std::string who = concat(describe(report.info), " on rank ", report.rank, " of ", size,
                                 " (call ", report.sequence, " on GPUs)");
  switch (report.reason) {
    case Report::kTimeout: {
      std::ostringstream waited;
      waited << std::fixed << std::setprecision(1) << static_cast<double>(report.patience_ns) * 1e-9
             << " s";
      return {ErrorKind::kTimeout,
              concat(who, " reached its timeout after ", waited.str(), " of waiting for ",
                     what_is_missing(report, peer_reports))};
    }
    case Report::kPeerFailed:
      if (const std::string lost = lost_to(peer_reports); !lost.empty()) {
        return {ErrorKind::kPeerLost, concat(who, " cannot finish: ", lost)};
      }
      return {ErrorKind::kPeerLost,
              report.missing == report.rank
                  ? concat(who, " was not run: an earlier call of this group failed here")
                  : concat(who, " cannot finish: rank ", report.missing,
                           " has aborted the group; its own error says why")};
    case Report::kMismatch:
      return {
          ErrorKind::kMismatch,
          concat(who, ": rank ", report.missing, " made another call", other_call(report),
                 ". Ranks must make the same calls in the same order; no data was moved, and the "
                 "group takes no more tensors on GPUs")};
    case Report::kSizes:
      return {ErrorKind::kMismatch,
              concat(who, ": rank ", report.missing, " gives rank ", report.taker, ' ',
                     report.given, " bytes, which expects ", report.expected,
                     "; no data was moved, and the group takes no more tensors on GPUs")};
    default:
      if (const std::string lost = lost_to(peer_reports); !lost.empty()) {
        return {ErrorKind::kPeerLost, concat(who, " cannot finish: ", lost)};
      }
      return {ErrorKind::kAborted, concat(who, " was ended by abort()")};
  }
}

}  // namespace dreamcomm::gpu
