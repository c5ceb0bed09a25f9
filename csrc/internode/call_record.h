// What a call of a group on several hosts leaves for people to look at: to tools that look from
// outside while it runs, and in the books of the group's recorder.
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
  /// One at a time of a group. All references must outlive it. It has failed, unless it is said to
  /// be done.
  CallRecord(MultiNodeState& shown, const Recorder& recorder, TscClock& clock,
             const Request& request);
  CallRecord(const CallRecord&) = delete;
  CallRecord& operator=(const CallRecord&) = delete;

  /// Where its waits for other hosts are noted, or null.
  Timeline* timeline() const { return entry_.timeline(); }
  std::int64_t number() const { return number_; }
  /// Over by `trip`, in that way, where the other hosts' word takes so many seconds to come: of a
  /// call by leaders it brings their data.
  void done(const LinkContext& context, const Way& way, double word);

 private:
  MultiNodeState& shown_;
  const Clock::time_point now_;
  const Kind kind_;
  const std::int64_t number_;
  const InCallScope entered_;
  Entry entry_;
};

}  // namespace dreamcomm
