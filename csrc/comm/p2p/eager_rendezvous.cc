// The tag matcher's three rings: announcements, grants, buffers.
#include <algorithm>
#include <cstring>

#include "comm/p2p/tag_matching.h"

namespace dreamcomm {
namespace {

bool has_room(std::uint32_t written, const Flag& read, std::uint32_t places) {
  return written - read.read() < places;
}

}  // namespace

Outbox& TagMatcher::outbox(int owner, int receiver) const {
  return state_.fabric().layout().outbox(state_.fabric().window(owner), receiver);
}

Inbox& TagMatcher::inbox(int owner, int sender) const {
  return state_.fabric().layout().inbox(state_.fabric().window(owner), sender);
}

/// Moves what can be moved with one peer. The lock is released while bytes of
/// granted messages are copied.
bool TagMatcher::pump(int peer, Lock& lock) {
  bool moved = take_announcements(peer);
  moved |= place_grants(peer);
  moved |= ready_to_send(peer);
  moved |= take_grants(peer);
  const bool rang = moved;
  if (rang) state_.fabric().header(peer).doorbell.ring();
  moved |= fill(peer, lock);
  moved |= drain(peer, lock);
  return moved;
}

bool TagMatcher::ready_to_send(int peer) {
  Link& to = link(peer);
  Outbox& box = outbox(state_.rank(), peer);
  const Flag& taken = inbox(peer, state_.rank()).envelopes_taken;
  bool moved = false;
  for (; !to.unannounced.empty() && has_room(box.announced.read(), taken, Outbox::kEnvelopes);
       moved = true) {
    Sending sending = std::move(to.unannounced.front());
    to.unannounced.pop_front();
    const std::uint32_t place = box.announced.read();
    Envelope& envelope = box.envelopes[place % Outbox::kEnvelopes];
    envelope.tag = sending.tag;
    envelope.bytes = sending.data.bytes;
    envelope.number = sending.number;
    envelope.is_inline = sending.data.bytes <= Envelope::kInline ? 1 : 0;
    if (envelope.is_inline != 0 && sending.data.bytes > 0) {
      std::memcpy(envelope.data.data(), sending.data.data, sending.data.bytes);
    }
    box.announced.publish(place + 1);
    if (envelope.is_inline != 0) {
      note_moved(peer, sending);
      finish(std::move(sending.completion), peer);
    } else {
      to.announced.push_back(std::move(sending));
    }
  }
  return moved;
}

bool TagMatcher::take_announcements(int peer) {
  const Outbox& box = outbox(peer, state_.rank());
  Flag& taken = inbox(state_.rank(), peer).envelopes_taken;
  bool moved = false;
  for (; taken.read() != box.announced.read(); moved = true) {
    const Envelope& envelope = box.envelopes[taken.read() % Outbox::kEnvelopes];
    Unexpected arrived{arrivals_++, envelope.tag, envelope.bytes, envelope.number, std::nullopt};
    if (envelope.is_inline != 0) {
      const std::size_t bytes = std::min<std::size_t>(envelope.bytes, Envelope::kInline);
      arrived.data.emplace(envelope.data.begin(),
                           envelope.data.begin() + static_cast<std::ptrdiff_t>(bytes));
    }
    taken.publish(taken.read() + 1);
    const auto fits = [&](const Receiving& r) {
      return r.tag == arrived.tag && (!r.peer || *r.peer == peer) && r.take();
    };
    const auto wanted = std::find_if(posted_.begin(), posted_.end(), fits);
    if (wanted == posted_.end()) {
      link(peer).arrived.push_back(std::move(arrived));
    } else {
      Receiving receiving = std::move(*wanted);
      posted_.erase(wanted);
      accept(peer, arrived, receiving);
    }
  }
  return moved;
}

bool TagMatcher::place_grants(int peer) {
  Link& from = link(peer);
  Inbox& box = inbox(state_.rank(), peer);
  const Flag& taken = outbox(peer, state_.rank()).grants_taken;
  bool moved = false;
  for (; !from.ungranted.empty() && has_room(box.granted.read(), taken, Inbox::kGrants);
       moved = true) {
    const std::uint32_t place = box.granted.read();
    box.grants[place % Inbox::kGrants] = from.ungranted.front();
    from.ungranted.pop_front();
    box.granted.publish(place + 1);
  }
  return moved;
}

bool TagMatcher::take_grants(int peer) {
  Link& to = link(peer);
  const Inbox& box = inbox(peer, state_.rank());
  Flag& taken = outbox(state_.rank(), peer).grants_taken;
  bool moved = false;
  for (; taken.read() != box.granted.read(); moved = true) {
    const ClearToSend clear_to_send = box.grants[taken.read() % Inbox::kGrants];
    taken.publish(taken.read() + 1);
    const auto granted =
        std::find_if(to.announced.begin(), to.announced.end(),
                     [&](const Sending& s) { return s.number == clear_to_send.number; });
    if (granted == to.announced.end()) continue;  // its sender has cancelled it meanwhile
    Sending sending = std::move(*granted);
    to.announced.erase(granted);
    if (clear_to_send.refused != 0) {
      drop(
          peer, sending,
          std::make_exception_ptr(Error(
              ErrorKind::kMismatch,
              concat("send of ", sending.data.bytes, " bytes with tag ", sending.tag, " to rank ",
                     number(peer), " on ", state_.who(), " was refused: the matching recv expects ",
                     clear_to_send.expected, " bytes"))));
    } else {
      to.outgoing.push_back(std::move(sending));
    }
  }
  return moved;
}

/// Copies the first granted message into free buffers. `filling` keeps other
/// threads off the front of `outgoing`, which stays where it is in the deque.
bool TagMatcher::fill(int peer, Lock& lock) {
  Link& to = link(peer);
  Outbox& box = outbox(state_.rank(), peer);
  const Flag& drained = inbox(peer, state_.rank()).drained;
  if (to.filling || to.outgoing.empty() ||
      !has_room(box.filled.read(), drained, Outbox::kBuffers)) {
    return false;
  }
  to.filling = true;
  Sending& sending = to.outgoing.front();
  lock.unlock();
  const WindowLayout& layout = state_.fabric().layout();
  std::byte* const window = state_.fabric().window(state_.rank());
  while (sending.moved < sending.data.bytes &&
         has_room(box.filled.read(), drained, Outbox::kBuffers)) {
    const std::uint32_t place = box.filled.read();
    const std::size_t part = std::min(layout.message_bytes(), sending.data.bytes - sending.moved);
    std::memcpy(layout.buffer(window, peer, place), sending.data.data + sending.moved, part);
    sending.moved += part;
    box.filled.publish(place + 1);
    state_.fabric().header(peer).doorbell.ring();
  }
  lock.lock();
  to.filling = false;
  if (sending.moved == sending.data.bytes) {
    note_moved(peer, sending);
    finish(std::move(sending.completion), peer);
    to.outgoing.pop_front();
  }
  return true;
}

/// True if a message of this peer is being taken, or is still to be taken.
bool TagMatcher::left_behind(int peer) const {
  const Outbox& box = outbox(peer, state_.rank());
  const Inbox& taken = inbox(state_.rank(), peer);
  const Link& from = links_[static_cast<std::size_t>(peer)];
  return from.draining || taken.envelopes_taken.read() != box.announced.read() ||
         (!from.incoming.empty() && taken.drained.read() != box.filled.read());
}

/// Copies filled buffers into the first granted receive; `draining` as above.
bool TagMatcher::drain(int peer, Lock& lock) {
  Link& from = link(peer);
  const Outbox& box = outbox(peer, state_.rank());
  Flag& drained = inbox(state_.rank(), peer).drained;
  if (from.draining || from.incoming.empty() || drained.read() == box.filled.read()) return false;
  from.draining = true;
  Receiving& receiving = from.incoming.front();
  lock.unlock();
  const WindowLayout& layout = state_.fabric().layout();
  std::byte* const window = state_.fabric().window(peer);
  while (receiving.moved < receiving.data.bytes && drained.read() != box.filled.read()) {
    const std::uint32_t place = drained.read();
    const std::size_t part =
        std::min(layout.message_bytes(), receiving.data.bytes - receiving.moved);
    std::memcpy(receiving.data.data + receiving.moved, layout.buffer(window, state_.rank(), place),
                part);
    receiving.moved += part;
    drained.publish(place + 1);
    state_.fabric().header(peer).doorbell.ring();
  }
  lock.lock();
  from.draining = false;
  if (receiving.moved == receiving.data.bytes) {
    note_moved(peer, receiving);
    finish(std::move(receiving.completion), peer);
    from.incoming.pop_front();
  }
  return true;
}

}  // namespace dreamcomm
