#include "c10d/backend/header_channel.h"

#include <cstring>
#include <memory>
#include <utility>

#include "c10d/base/convert.h"
#include "c10d/base/gil_signals.h"

namespace dreamcomm {
namespace {

constexpr std::uint32_t kMagic = 0x44434831;  // "DCH1"

/// What a header's bytes begin with. The description follows, and then the offsets.
struct Fields {
  std::uint32_t magic = kMagic;
  std::uint32_t size = 0;
  std::uint32_t inside = 0;  // bytes of the description in this message
  std::uint32_t offsets = 0;
  std::array<std::int64_t, KeyedHeader::kKeys> key{};
};
constexpr std::size_t kRoom = HeaderChannel::kBytes - sizeof(Fields);

/// Memory of one message. The sends and receives that are under way keep it.
Cargo make_cargo() {
  constexpr std::size_t kBytes = HeaderChannel::kBytes;
  return {std::shared_ptr<std::byte>(new std::byte[kBytes], std::default_delete<std::byte[]>()), 0,
          kBytes};
}

void throw_failure_of(const Completion& completion) {
  if (!completion.failure()) return;
  try {
    std::rethrow_exception(completion.failure());
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
}

/// Ends a wait, not the message.
struct TimeOver {};

}  // namespace

HeaderChannel::HeaderChannel(c10::intrusive_ptr<DreamBackend> backend, int tag)
    : backend_(std::move(backend)), tag_(tag), buffer_(make_cargo()) {}

HeaderChannel::~HeaderChannel() { cancel(); }

bool HeaderChannel::fits(std::size_t description, std::size_t offsets) {
  return description + offsets * sizeof(std::int64_t) <= kRoom;
}

void HeaderChannel::send(int peer, const KeyedHeader& header) {
  Fields fields;
  fields.size = header.size;
  fields.inside = static_cast<std::uint32_t>(header.description.size());
  fields.offsets = static_cast<std::uint32_t>(header.offsets.size());
  fields.key = header.key;
  TORCH_CHECK_VALUE(fits(fields.inside, header.offsets.size()), "a header of ", fields.inside,
                    " bytes and ", header.offsets.size(), " offsets is too long");
  const Cargo message = make_cargo();
  std::byte* at = message.data();
  std::memcpy(at, &fields, sizeof(fields));
  at += sizeof(fields);
  std::memcpy(at, header.description.data(), fields.inside);
  std::memcpy(at + fields.inside, header.offsets.data(),
              header.offsets.size() * sizeof(std::int64_t));
  std::shared_ptr<Completion> sent = backend_->send_cargo(message, peer, tag_);
  if (!sent->done()) {
    // The engine may read the memory until the message is done.
    sent->then([message](const std::exception_ptr&) {});
    sends_.push_back(std::move(sent));
  } else {
    throw_failure_of(*sent);
  }
}

std::size_t HeaderChannel::pending() {
  while (!sends_.empty() && sends_.front()->done()) {
    const std::shared_ptr<Completion> done = std::move(sends_.front());
    sends_.pop_front();
    throw_failure_of(*done);
  }
  return sends_.size();
}

std::optional<std::pair<int, KeyedHeader>> HeaderChannel::next(std::chrono::milliseconds timeout) {
  if (!posted_) {
    posted_ = backend_->receive_cargo(buffer_, tag_);
    posted_->then([memory = buffer_](const std::exception_ptr&) {});
  }
  if (!posted_->done()) {
    if (timeout.count() == 0) return std::nullopt;
    const Clock::time_point until = Clock::now() + timeout;
    try {
      backend_->wait_for(*posted_, [&] {
        check_signals();
        if (Clock::now() >= until) throw TimeOver();
      });
    } catch (const TimeOver&) {
    }
    if (!posted_->done()) return std::nullopt;
  }
  const std::shared_ptr<Completion> done = std::exchange(posted_, nullptr);
  throw_failure_of(*done);
  return std::pair(done->source(), read());
}

void HeaderChannel::cancel() {
  if (!posted_ || posted_->done()) return;
  backend_->cancel(*posted_);
  // One that took no message is forgotten: the next call posts another.
  if (posted_->done() && posted_->failure()) posted_.reset();
}

KeyedHeader HeaderChannel::read() const {
  const std::byte* at = buffer_.data();
  Fields fields;
  std::memcpy(&fields, at, sizeof(fields));
  TORCH_CHECK(fields.magic == kMagic && fits(fields.inside, fields.offsets),
              "a message under this tag is no header: is the tag used by another program?");
  at += sizeof(fields);
  KeyedHeader header;
  header.key = fields.key;
  header.size = fields.size;
  header.description.assign(reinterpret_cast<const char*>(at), fields.inside);
  header.offsets.resize(fields.offsets);
  std::memcpy(header.offsets.data(), at + fields.inside, fields.offsets * sizeof(std::int64_t));
  return header;
}

}  // namespace dreamcomm
