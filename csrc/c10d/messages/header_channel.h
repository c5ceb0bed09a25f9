// Short messages with a key, from all peers through one receive.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "c10d/messages/header.h"
#include "c10d/messages/message_carrier.h"

namespace dreamcomm {

/// One rank's end. For one thread at a time. Headers of one peer arrive in the order in which it
/// sent them.
///
/// INVARIANT: one receive is posted at most, and the next one after its header has been read from
/// the buffer. So the buffer holds one header, and no header overwrites another. cancel() forgets a
/// receive only if no message has claimed it (Completion::take): a claimed one stays posted, and
/// the next call of next() returns its header. So no header is lost.
///
/// INVARIANT: memory that is sent or received belongs to the message until that is done, whether or
/// not the channel still exists.
class HeaderChannel {
 public:
  HeaderChannel(std::shared_ptr<MessageCarrier> carrier, int tag);
  /// Cancels the receive.
  ~HeaderChannel();
  HeaderChannel(const HeaderChannel&) = delete;
  HeaderChannel& operator=(const HeaderChannel&) = delete;

  /// Throws Error(kInvalid) if the header does not fit (KeyedHeader::fits).
  void send(int peer, const KeyedHeader& header);
  /// The number of headers under way. Throws a failed one's error.
  std::size_t pending();
  /// The next header and its sender; waits so long for it, 0: not at all. `interrupt` runs
  /// meanwhile.
  std::optional<std::pair<int, KeyedHeader>> next(std::chrono::milliseconds timeout,
                                                  const Interrupt& interrupt);
  /// Cancels the receive that waits for the next header. A header that has arrived stays.
  void cancel();

 private:
  void post();
  bool wait(std::chrono::milliseconds timeout, const Interrupt& interrupt);

  const std::shared_ptr<MessageCarrier> carrier_;
  const int tag_;
  const Cargo buffer_;
  std::shared_ptr<Completion> posted_;
  std::deque<std::shared_ptr<Completion>> sends_;
};

}  // namespace dreamcomm
