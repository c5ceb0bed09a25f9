#include "c10d/messages/header_channel.h"

#include <exception>

namespace dreamcomm {
namespace {

/// Memory of one message.
Cargo make_cargo() {
  constexpr std::size_t kBytes = KeyedHeader::kBytes;
  return {std::shared_ptr<std::byte>(new std::byte[kBytes], std::default_delete<std::byte[]>()), 0,
          kBytes};
}

void keep_until_done(Completion& completion, const Cargo& memory) {
  completion.then([memory](const std::exception_ptr&) {});
}

void throw_failure_of(const Completion& completion) {
  if (completion.failure()) std::rethrow_exception(completion.failure());
}

/// Ends a wait, not the message.
struct TimeOver {};

}  // namespace

HeaderChannel::HeaderChannel(std::shared_ptr<MessageCarrier> carrier, int tag)
    : carrier_(std::move(carrier)), tag_(tag), buffer_(make_cargo()) {}

HeaderChannel::~HeaderChannel() { cancel(); }

void HeaderChannel::send(int peer, const KeyedHeader& header) {
  const Cargo message = make_cargo();
  header.write(message.data());
  std::shared_ptr<Completion> sent = carrier_->send_cargo(message, peer, tag_);
  if (sent->done()) return throw_failure_of(*sent);
  keep_until_done(*sent, message);
  sends_.push_back(std::move(sent));
}

std::size_t HeaderChannel::pending() {
  while (!sends_.empty() && sends_.front()->done()) {
    const std::shared_ptr<Completion> done = std::move(sends_.front());
    sends_.pop_front();
    throw_failure_of(*done);
  }
  return sends_.size();
}

std::optional<std::pair<int, KeyedHeader>> HeaderChannel::next(std::chrono::milliseconds timeout,
                                                               const Interrupt& interrupt) {
  post();
  if (!wait(timeout, interrupt)) return std::nullopt;
  const std::shared_ptr<Completion> done = std::exchange(posted_, nullptr);
  throw_failure_of(*done);
  return std::pair(done->source(), KeyedHeader::read(buffer_.data()));
}

void HeaderChannel::post() {
  if (posted_) return;
  posted_ = carrier_->receive_cargo(buffer_, tag_);
  keep_until_done(*posted_, buffer_);
}

/// Returns whether the posted receive is done.
bool HeaderChannel::wait(std::chrono::milliseconds timeout, const Interrupt& interrupt) {
  if (posted_->done() || timeout.count() == 0) return posted_->done();
  const Clock::time_point until = Clock::now() + timeout;
  try {
    carrier_->wait_for(*posted_, [&] {
      interrupt();
      if (Clock::now() >= until) throw TimeOver();
    });
  } catch (const TimeOver&) {
  }
  return posted_->done();
}

void HeaderChannel::cancel() {
  if (!posted_ || posted_->done()) return;
  carrier_->cancel(*posted_);
  if (posted_->done() && posted_->failure()) posted_.reset();
}

}  // namespace dreamcomm
