#include "internode/call_record.h"

#include <algorithm>

#include "algorithms/signature.h"

namespace dreamcomm {
namespace {

/// The last of all hosts' ranks. The other hosts' message takes `transfer` seconds, in which no
/// rank is waited for, and sometimes somewhat longer. Beside a long wait for a rank of this host,
/// that excess means nothing.
LastToCome last_of(const LinkContext::Latest& latest, std::int64_t entered_ns, double transfer) {
  constexpr int kMuch = 4;
  LastToCome far = latest.between;
  far.at_ns -= static_cast<std::int64_t>(transfer * 1e9);
  const std::int64_t for_far = far.at_ns - latest.here.at_ns;
  const std::int64_t for_here = std::max<std::int64_t>(latest.here.at_ns - entered_ns, 0);
  return far.rank >= 0 && for_far > for_here / kMuch ? far : latest.here;
}

}  // namespace

CallRecord::CallRecord(MultiNodeState& shown, const Recorder& recorder, TscClock& clock,
                       const Request& request)
    : shown_(shown),
      now_(clock.now()),
      kind_(request.kind),
      number_(shown.calls.sequence.read() + 1),
      entered_(shown.calls, request.kind, block_bytes(request), number_, now_),
      entry_(recorder, clock,
             [&] { return record_of(request, number_, block_bytes(request), to_ns(now_)); }) {}

void CallRecord::done(const LinkContext& context, const Way& way, double transfer) {
  Tally& counts = shown_.tallies[static_cast<std::size_t>(kind_)];
  counts.calls.grow(1);
  counts.sent.grow(static_cast<std::int64_t>(context.traffic().sent));
  counts.received.grow(static_cast<std::int64_t>(context.traffic().received));
  if (!entry_.wanted()) return;
  const LastToCome last = last_of(context.latest, to_ns(now_), transfer);
  Record& record = entry_.record();
  record.arrived_ns = last.at_ns;
  record.peer = last.rank;
  record.row = way.leaders ? Record::kByLeaders : Record::kByCarriers;
  entry_.done();
}

}  // namespace dreamcomm
