// Shows messages between hosts to observers.
#include "comm/record/recorder.h"
#include "internode/p2p/tag_matching.h"
#include "transport/window.h"

namespace dreamcomm {

Tally& InternodeTagMatcher::tally(Kind kind) const {
  return options_.shown.tallies[static_cast<std::size_t>(kind)];
}

/// All bytes of a message have been sent, or received.
void InternodeTagMatcher::note_moved(const Message& message) {
  Tally& counts = tally(message.kind);
  Gauge& bytes = message.kind == Kind::kSend ? counts.sent : counts.received;
  bytes.grow(static_cast<std::int64_t>(message.cargo.bytes));
  note(message, Record::State::kDone);
}

void InternodeTagMatcher::note(const Message& message, Record::State state) {
  Recorder& recorder = options_.recorder;
  if (recorder.idle()) return;
  recorder.note_message({.number = message.number,
                         .bytes = static_cast<std::int64_t>(message.cargo.bytes),
                         .entered_ns = message.asked_ns,
                         .ended_ns = now_ns(),
                         .peer = message.rank.value_or(-1),
                         .kind = message.kind,
                         .state = state});
}

/// Shows tools the message that has been under way for longest. Receives from any source are shown
/// by this host's tag matcher.
void InternodeTagMatcher::show_oldest() const {
  Correspondence& shown = options_.shown.messages;
  std::int64_t pending = 0;
  const Message* oldest = nullptr;
  const auto look = [&](const auto& messages) {
    for (const MessagePtr& m : messages) {
      if (!m->rank) continue;
      ++pending;
      if (oldest == nullptr || m->asked_ns < oldest->asked_ns) oldest = m.get();
    }
  };
  look(wanted_);
  look(under_way_);
  if (oldest != nullptr) {
    shown.kind.set(static_cast<std::int64_t>(oldest->kind));
    shown.peer.set(*oldest->rank);
    shown.bytes.set(static_cast<std::int64_t>(oldest->cargo.bytes));
    shown.since_ns.set(oldest->asked_ns);
  }
  shown.pending.set(pending);
}

}  // namespace dreamcomm
