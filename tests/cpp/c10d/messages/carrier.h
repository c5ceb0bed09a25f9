// A HeaderChannel's carrier over a communicator.
#pragma once

#include "c10d/messages/message_carrier.h"
#include "comm/communicator.h"

namespace dreamcomm::testing {

class CommCarrier final : public MessageCarrier {
 public:
  explicit CommCarrier(Communicator& comm) : comm_(comm) {}

  std::shared_ptr<Completion> send_cargo(const Cargo& cargo, int dst, int tag) override {
    return comm_.send(cargo, dst, static_cast<std::uint64_t>(tag), deadline());
  }
  std::shared_ptr<Completion> receive_cargo(const Cargo& cargo, int tag) override {
    return comm_.receive(cargo, std::nullopt, static_cast<std::uint64_t>(tag), deadline());
  }
  void wait_for(Completion& completion, const Interrupt& pause) override {
    try {
      comm_.wait(completion, pause);
    } catch (const Error&) {
      if (!completion.done()) throw;  // otherwise the message holds its error
    }
  }
  void cancel(const Completion& completion) override { comm_.cancel(completion); }

 private:
  static Clock::time_point deadline() { return Clock::now() + std::chrono::seconds(60); }

  Communicator& comm_;
};

}  // namespace dreamcomm::testing
