#include "transport/window.h"

#include <unistd.h>

#include <new>

#include "core/error.h"
#include "core/round_up.h"

namespace dreamcomm {
namespace {

constexpr std::size_t kSystemPage = 4096;

}  // namespace

WindowLayout::WindowLayout(int size, std::size_t page_bytes, std::size_t message_bytes)
    : size_(size),
      page_bytes_(round_up(page_bytes, kLine)),
      message_bytes_(round_up(message_bytes, kLine)) {
  // A page holds a line of signature and at least a line for every rank.
  const std::size_t least = (static_cast<std::size_t>(size) + 4) * 2 * kLine;
  check(page_bytes_ >= least, ErrorKind::kInvalid, "page_bytes is ", page_bytes,
        ", but a group of ", size, " ranks needs at least ", least);
  check(message_bytes_ >= kLine, ErrorKind::kInvalid, "message_bytes is ", message_bytes,
        ", but must be at least ", kLine);
  pages_ = round_up(sizeof(Header), kSystemPage);
  outboxes_ = round_up(pages_ + 2 * page_bytes_, kSystemPage);
  inboxes_ = outboxes_ + static_cast<std::size_t>(size_) * outbox_stride();
}

// `construct` created these objects in the memory, here or in another process.

Header& WindowLayout::header(std::byte* window) const {
  return *std::launder(reinterpret_cast<Header*>(window));
}

Outbox& WindowLayout::outbox(std::byte* window, int receiver) const {
  return *std::launder(reinterpret_cast<Outbox*>(
      window + outboxes_ + static_cast<std::size_t>(receiver) * outbox_stride()));
}

std::byte* WindowLayout::buffer(std::byte* window, int receiver, std::uint32_t index) const {
  return window + outboxes_ + static_cast<std::size_t>(receiver) * outbox_stride() +
         sizeof(Outbox) + (index % Outbox::kBuffers) * message_bytes_;
}

Inbox& WindowLayout::inbox(std::byte* window, int sender) const {
  return *std::launder(reinterpret_cast<Inbox*>(window + inboxes_ +
                                                static_cast<std::size_t>(sender) * sizeof(Inbox)));
}

void WindowLayout::construct(std::byte* window, int rank, std::uint32_t start) const {
  Header* header = new (window) Header{};
  header->rank = static_cast<std::uint32_t>(rank);
  header->identity = {.version = kProtocolVersion,
                      .pid = static_cast<std::int32_t>(getpid()),
                      .rank = rank,
                      .size = size_,
                      .here = 0,
                      .team = {},
                      .group = {}};
  header->round.publish(start);
  header->progress.waiting_for.set(-1);
  header->whole.calls.waiting_for.set(-1);
  header->progress.cpu.set(-1);
  for (int peer = 0; peer < size_; ++peer) {
    auto* out = new (static_cast<void*>(&outbox(window, peer))) Outbox;
    auto* in = new (static_cast<void*>(&inbox(window, peer))) Inbox;
    out->announced.publish(start);
    out->grants_taken.publish(start);
    out->filled.publish(start);
    in->envelopes_taken.publish(start);
    in->granted.publish(start);
    in->drained.publish(start);
  }
}

}  // namespace dreamcomm
