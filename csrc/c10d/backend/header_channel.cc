#include "c10d/backend/header_channel.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>

#include "c10d/work/work.h"

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

at::Tensor make_buffer() {
  return at::empty({static_cast<std::int64_t>(HeaderChannel::kBytes)}, at::kByte);
}

}  // namespace

HeaderChannel::HeaderChannel(c10::intrusive_ptr<DreamBackend> backend, int tag)
    : backend_(std::move(backend)), tag_(tag), buffer_(make_buffer()) {}

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
  const at::Tensor message = make_buffer();
  auto* at = message.mutable_data_ptr<std::uint8_t>();
  std::memcpy(at, &fields, sizeof(fields));
  at += sizeof(fields);
  std::memcpy(at, header.description.data(), fields.inside);
  std::memcpy(at + fields.inside, header.offsets.data(),
              header.offsets.size() * sizeof(std::int64_t));
  DreamBackend::TensorList tensors{message};
  WorkPtr work = backend_->send(tensors, peer, tag_);
  if (!work->isCompleted()) sends_.push_back(std::move(work));
}

std::size_t HeaderChannel::pending() {
  while (!sends_.empty() && sends_.front()->isCompleted()) {
    const WorkPtr done = std::move(sends_.front());
    sends_.pop_front();
    done->wait();  // throws its error
  }
  return sends_.size();
}

std::optional<std::pair<int, KeyedHeader>> HeaderChannel::next(
    std::chrono::milliseconds timeout) {
  if (!posted_) {
    DreamBackend::TensorList tensors{buffer_};
    posted_ = backend_->recvAnysource(tensors, tag_);
  }
  if (!posted_->isCompleted()) {
    if (timeout.count() == 0) return std::nullopt;
    try {
      posted_->wait(timeout);
    } catch (const c10::Error&) {
      // Its own error is thrown below, also where it ended after the time to wait.
      if (!posted_->isCompleted()) return std::nullopt;
    }
  }
  const WorkPtr done = std::exchange(posted_, {});
  done->wait();
  return std::pair(done->sourceRank(), read());
}

void HeaderChannel::cancel() {
  if (auto* message = dynamic_cast<MessageWork*>(posted_.get())) message->cancel();
}

KeyedHeader HeaderChannel::read() const {
  const auto* at = buffer_.const_data_ptr<std::uint8_t>();
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
