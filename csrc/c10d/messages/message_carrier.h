// The functions of a group that a HeaderChannel needs.
#pragma once

#include <memory>

#include "comm/group_communicator.h"
#include "comm/p2p/completion.h"
#include "transport/link.h"

namespace dreamcomm {

/// Messages of memory that the cargo keeps. As GroupCommunicator's, with a deadline of the group.
class MessageCarrier {
 public:
  virtual ~MessageCarrier() = default;
  virtual std::shared_ptr<Completion> send_cargo(const Cargo& cargo, int dst, int tag) = 0;
  /// From any rank.
  virtual std::shared_ptr<Completion> receive_cargo(const Cargo& cargo, int tag) = 0;
  /// Helps the message along until it is done, or until `pause` throws. A message that fails is
  /// done, and holds its error.
  virtual void wait_for(Completion& completion, const Interrupt& pause) = 0;
  /// Ends a receive that no thread waits for, unless its message is there.
  virtual void cancel(const Completion& completion) = 0;
};

}  // namespace dreamcomm
