#include "internode/p2p/tag_matching.h"

#include <algorithm>
#include <cstring>

namespace dreamcomm {

InternodeTagMatcher::InternodeTagMatcher(std::unique_ptr<Link> link, const Topology& topology,
                                         int rank, Options options)
    : link_(std::move(link)), topology_(topology), rank_(rank), options_(std::move(options)) {}

InternodeTagMatcher::~InternodeTagMatcher() {
  close("the group was shut down");
  {
    const std::scoped_lock lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  if (timeouts_.joinable()) timeouts_.join();
  peers_.clear();  // no thread looks for one after this; their threads end
}

std::shared_ptr<Completion> InternodeTagMatcher::send(const Cargo& cargo, int rank,
                                                      std::uint64_t tag,
                                                      Clock::time_point deadline) {
  Lock lock(mutex_);
  const auto message = std::make_shared<Message>(
      Message{Kind::kSend, rank, tag, cargo, deadline, std::make_shared<Completion>()});
  message->number = numbers_[rank]++;
  tally(Kind::kSend).calls.grow(1);
  under_way_.push_back(message);
  const MessageHeader header{.number = message->number, .tag = tag, .bytes = cargo.bytes};
  try {
    PeerChannel& to = peer(rank);
    if (header.is_whole()) {
      to.write(header, {cargo.data(), cargo.bytes},
               [this, message](std::exception_ptr failure) { end(message, std::move(failure)); });
    } else {
      to.write(header, {}, {});
      message->parcel = to.send(cargo, message->number);
    }
    watch(deadline);
  } catch (const Error& error) {
    drop(message, error.kind(), concat(" cannot finish: ", error.what()));
  }
  settle(lock);
  return message->completion;
}

std::shared_ptr<Completion> InternodeTagMatcher::receive(const Cargo& cargo, int rank,
                                                         std::uint64_t tag,
                                                         Clock::time_point deadline) {
  Lock lock(mutex_);
  const auto message = std::make_shared<Message>(
      Message{Kind::kRecv, rank, tag, cargo, deadline, std::make_shared<Completion>()});
  tally(Kind::kRecv).calls.grow(1);
  try {
    if (!match(message)) {
      peer(rank);
      wanted_.push_back(message);
      watch(deadline);
    }
  } catch (const Error& error) {
    drop(message, error.kind(), concat(" cannot finish: ", error.what()));
  }
  settle(lock);
  return message->completion;
}

void InternodeTagMatcher::receive_any(const Cargo& cargo, std::uint64_t tag,
                                      Clock::time_point deadline,
                                      std::shared_ptr<Completion> completion) {
  Lock lock(mutex_);
  const auto message = std::make_shared<Message>(
      Message{Kind::kRecv, std::nullopt, tag, cargo, deadline, std::move(completion)});
  forget_taken();
  if (!match(message)) {
    listen_to_all();
    start_timeouts();
    wanted_.push_back(message);
    watch(deadline);
    if (why_alone_) changed_.notify_all();
  }
  settle(lock);
}

/// Returns the channel to a rank, which is listened to from here on. Throws Error(kPeerLost).
PeerChannel& InternodeTagMatcher::peer(int rank) {
  check(closed_.empty(), ErrorKind::kAborted, closed_);
  const auto lost = lost_.find(rank);
  check(lost == lost_.end(), ErrorKind::kPeerLost, lost == lost_.end() ? "" : lost->second);
  auto known = peers_.find(rank);
  if (known == peers_.end()) {
    auto made = std::make_unique<PeerChannel>(
        *link_, rank,
        PeerChannel::Events{
            [this, rank](const MessageHeader& header, std::span<const std::byte> bytes) {
              on_header(rank, header, bytes);
            },
            [this, rank](const std::string& reason) { fail_peer(rank, reason); }});
    known = peers_.emplace(rank, std::move(made)).first;
  }
  return *known->second;
}

/// Listens to all ranks of other hosts, except lost ones.
void InternodeTagMatcher::listen_to_all() {
  for (int rank = 0; rank < topology_.size(); ++rank) {
    const bool far = topology_.host_of(rank) != topology_.host_of(rank_);
    if (far && lost_.count(rank) == 0 && closed_.empty()) peer(rank);
  }
}

std::string InternodeTagMatcher::place(int rank) const {
  return concat("rank ", rank, " of ", topology_.words(topology_.host_of(rank)));
}

/// "recv of 12 bytes with tag 0 from rank 2 of host beta (ranks 2, 3) on rank 0 ..."
std::string InternodeTagMatcher::words(const Message& message) const {
  const std::string other = message.rank ? place(*message.rank) : "any rank";
  return concat(name(message.kind), " of ", message.cargo.bytes, " bytes with tag ", message.tag,
                message.kind == Kind::kSend ? " to " : " from ", other, " on ", options_.who);
}

void InternodeTagMatcher::on_header(int rank, const MessageHeader& header,
                                    std::span<const std::byte> bytes) {
  Lock lock(mutex_);
  if (!closed_.empty()) return;
  if (header.about != MessageHeader::About::kMessage) {
    on_report(rank, header);
    settle(lock);
    return;
  }
  Unexpected arrived{rank, header, {bytes.begin(), bytes.end()}};
  forget_taken();
  const auto fits = [&](const MessagePtr& m) {
    if (m->tag != header.tag || (m->rank && *m->rank != rank)) return false;
    return m->rank || m->completion->take();
  };
  const auto found = std::find_if(wanted_.begin(), wanted_.end(), fits);
  if (found == wanted_.end()) {
    unexpected_.push_back(std::move(arrived));
  } else {
    const MessagePtr message = *found;
    wanted_.erase(found);
    accept(message, arrived);
  }
  settle(lock);
}

/// Removes receives from any source that have got a message of this host.
void InternodeTagMatcher::forget_taken() {
  std::erase_if(wanted_, [](const MessagePtr& m) { return !m->rank && m->completion->taken(); });
}

/// Handles the receiver's report on a message of this rank.
void InternodeTagMatcher::on_report(int rank, const MessageHeader& header) {
  const auto found = std::find_if(under_way_.begin(), under_way_.end(), [&](const MessagePtr& m) {
    return m->parcel && m->rank == rank && m->number == header.number;
  });
  if (found == under_way_.end()) return;  // it was dropped meanwhile
  const MessagePtr message = *found;
  std::shared_ptr<Parcel> parcel = std::exchange(message->parcel, nullptr);
  if (header.about == MessageHeader::About::kTaken) {
    move(message, std::move(parcel));
    return;
  }
  const std::string why =
      concat(" was refused: the matching recv expects ", header.expected, " bytes");
  peers_.at(rank)->follow(std::move(parcel), [this, message, why](const std::exception_ptr&) {
    Lock lock(mutex_);
    drop(message, ErrorKind::kMismatch, why);
    settle(lock);
  });
}

/// Gives the receive the earliest message that fits, if there is one.
bool InternodeTagMatcher::match(const MessagePtr& message) {
  const auto found = std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& a) {
    return a.header.tag == message->tag && (!message->rank || *message->rank == a.rank);
  });
  if (found == unexpected_.end()) return false;
  if (!message->rank && !message->completion->take()) return true;  // claimed by this host
  const Unexpected arrived = std::move(*found);
  unexpected_.erase(found);
  accept(message, arrived);
  return true;
}

/// Joins a message and the receive that has claimed it.
void InternodeTagMatcher::accept(const MessagePtr& message, const Unexpected& arrived) {
  if (!message->rank) taken_.push_back(message->completion);
  message->rank = arrived.rank;
  message->number = arrived.header.number;
  message->matched = true;
  if (arrived.header.bytes != message->cargo.bytes) {
    refuse(message, arrived);
    return;
  }
  if (arrived.header.is_whole()) {
    if (!arrived.bytes.empty()) {
      std::memcpy(message->cargo.data(), arrived.bytes.data(), arrived.bytes.size());
    }
    note_moved(*message);
    finished_.push_back({message->completion, arrived.rank, nullptr});
    return;
  }
  under_way_.push_back(message);
  try {
    PeerChannel& from = peer(arrived.rank);
    std::shared_ptr<Parcel> parcel = from.receive(message->cargo, message->number);
    // It is written before the bytes are received: a rank that has received them may end the group,
    // and the sender waits for this header.
    from.write({.about = MessageHeader::About::kTaken, .number = message->number}, {}, {});
    move(message, std::move(parcel));
    watch(message->deadline);
  } catch (const Error& error) {
    drop(message, error.kind(), concat(" cannot finish: ", error.what()));
  }
}

/// The bytes arrive all the same, because they cannot be called back.
void InternodeTagMatcher::refuse(const MessagePtr& message, const Unexpected& arrived) {
  const std::string sent =
      concat(" expects ", message->cargo.bytes, " bytes, but ", place(arrived.rank), " sent ",
             arrived.header.bytes, "; give both sides tensors of the same size and dtype");
  drop(message, ErrorKind::kMismatch, sent);
  if (arrived.header.is_whole()) return;
  try {
    const Cargo waste{{new std::byte[arrived.header.bytes], std::default_delete<std::byte[]>()},
                      0,
                      arrived.header.bytes};
    PeerChannel& from = peer(arrived.rank);
    std::shared_ptr<Parcel> parcel = from.receive(waste, message->number);
    from.write({.about = MessageHeader::About::kRefused,
                .number = message->number,
                .expected = message->cargo.bytes},
               {}, {});
    from.follow(std::move(parcel), [waste](const std::exception_ptr&) {});
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // The sender is lost, or memory is short.
  }
}

/// Follows the bytes, which both ranks move now.
void InternodeTagMatcher::move(const MessagePtr& message, std::shared_ptr<Parcel> parcel) {
  peers_.at(*message->rank)->follow(std::move(parcel), [this, message](std::exception_ptr failure) {
    end(message, std::move(failure));
  });
}

/// Called on a peer's thread, without the lock.
void InternodeTagMatcher::end(const MessagePtr& message, std::exception_ptr failure) {
  std::string why;
  if (failure) {
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      why = options_.causes.of(*message->rank, error.what());
    }
  }
  Lock lock(mutex_);
  if (failure) {
    drop(message, ErrorKind::kPeerLost, concat(" cannot finish: ", why));
  } else {
    under_way_.remove(message);
    note_moved(*message);
    finished_.push_back({message->completion, *message->rank, nullptr});
  }
  settle(lock);
}

/// Ends a message that will not be moved. `why` follows its description.
void InternodeTagMatcher::drop(const MessagePtr& message, ErrorKind kind, const std::string& why) {
  std::erase(wanted_, message);
  under_way_.remove(message);
  note(*message, Record::State::kFailed);
  finished_.push_back({message->completion, message->rank.value_or(-1),
                       std::make_exception_ptr(Error(kind, concat(words(*message), why)))});
}

void InternodeTagMatcher::drop_where(const std::function<bool(const Message&)>& concerns,
                                     ErrorKind kind, const std::string& why) {
  std::vector<MessagePtr> all(wanted_.begin(), wanted_.end());
  all.insert(all.end(), under_way_.begin(), under_way_.end());
  for (const MessagePtr& message : all) {
    if (!concerns(*message)) continue;
    // This host's tag matcher may have claimed a receive from any source.
    if (message->rank || message->completion->take()) {
      drop(message, kind, why);
    } else {
      std::erase(wanted_, message);
    }
  }
}

void InternodeTagMatcher::drop_all(ErrorKind kind, const std::string& reason) {
  drop_where([](const Message&) { return true; }, kind, concat(" was ended: ", reason));
}

/// Called on the peer's thread. Receives from any source may still get other ranks' messages, and a
/// followed parcel may have arrived: that ends by itself.
void InternodeTagMatcher::fail_peer(int rank, const std::string& reason) {
  const auto waits = [rank](const Message& m) { return m.rank == rank && m.waits_for_peer(); };
  const auto any_waits = [&](const auto& messages) {
    return std::any_of(messages.begin(), messages.end(),
                       [&](const MessagePtr& m) { return waits(*m); });
  };
  Lock lock(mutex_);
  lost_.emplace(rank, reason);
  changed_.notify_all();
  if (!any_waits(wanted_) && !any_waits(under_way_)) return;  // it may have left cleanly
  lock.unlock();
  const std::string why = options_.causes.of(rank, reason);  // asking takes a while
  lock.lock();
  drop_where(waits, ErrorKind::kPeerLost, concat(" cannot finish: ", why));
  settle(lock);
}

void InternodeTagMatcher::fail_all(ErrorKind kind, const std::string& reason) {
  Lock lock(mutex_);
  drop_all(kind, reason);
  settle(lock);
}

void InternodeTagMatcher::close(const std::string& reason) {
  Lock lock(mutex_);
  if (!closed_.empty()) return;
  closed_ = reason;
  for (const auto& [rank, peer] : peers_) peer->end();
  drop_all(ErrorKind::kAborted, reason);
  settle(lock);
  link_->close();
}

/// Finishes the completions without the lock: their callbacks may call back.
void InternodeTagMatcher::settle(Lock& lock) {
  const std::vector<Finished> finished = std::exchange(finished_, {});
  const std::vector<std::shared_ptr<Completion>> taken = std::exchange(taken_, {});
  show_oldest();
  lock.unlock();
  for (const auto& completion : taken) options_.taken(*completion);
  for (const Finished& one : finished) one.completion->finish(one.rank, one.failure);
  if (!finished.empty()) options_.finished();
}

}  // namespace dreamcomm
