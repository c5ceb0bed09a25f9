// Shows a multi-node call to observers: progress to tools while it runs, and a record afterwards in
// the books of the group's recorder.
#pragma once

#include <cstdint>

#include "comm/call_scopes.h"
#include "comm/record/recorder.h"
#include "core/request.h"
#include "core/tsc_clock.h"
#include "internode/collectives/link_context.h"
#include "internode/cost/model.h"
#include "transport/window.h"

namespace dreamcomm {

class CallRecord {
 public:
  /// One at a time in a group. All references must outlive it. The call counts as failed unless
  /// done() is called.
  CallRecord(MultiNodeState& shown, const Recorder& recorder, TscClock& clock,
             const Request& request);
  CallRecord(const CallRecord&) = delete;
  CallRecord& operator=(const CallRecord&) = delete;

  /// Records its waits for other hosts, or null.
  Timeline* timeline() const { return entry_.timeline(); }
  std::int64_t number() const { return number_; }
  /// The call has ended, on `context` and in this way. The other hosts' message takes `transfer`
  /// seconds to arrive: in a call by leaders it brings their data.
  void done(const LinkContext& context, const Way& way, double transfer);

 private:
  MultiNodeState& shown_;
  const Clock::time_point now_;
  const Kind kind_;
  const std::int64_t number_;
  const InCallScope entered_;
  Entry entry_;
};

}  // namespace dreamcomm
