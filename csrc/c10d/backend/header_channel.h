// Short messages with a key, from all peers through one receive: what other messages, or tensors
// that were placed in a heap, are described by.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "c10d/backend/backend.h"

namespace dreamcomm {

/// What a short message holds.
struct KeyedHeader {
  static constexpr int kKeys = 5;

  std::array<std::int64_t, kKeys> key{};  // what the receiver finds it by
  std::uint32_t size = 0;                 // bytes of the description
  std::string description;                // empty where it does not fit: then it follows
  std::vector<std::int64_t> offsets;      // of tensors that are placed; -1: the tensor follows
};

/// One rank's end. For one thread at a time. Headers of one peer arrive in the order in which it
/// sent them.
class HeaderChannel {
 public:
  /// Such a message travels inside its announcement (transport/window.h).
  static constexpr std::size_t kBytes = 960;

  HeaderChannel(c10::intrusive_ptr<DreamBackend> backend, int tag);
  /// Cancels the receive.
  ~HeaderChannel();
  HeaderChannel(const HeaderChannel&) = delete;
  HeaderChannel& operator=(const HeaderChannel&) = delete;

  /// True if a description of so many bytes fits, with as many offsets.
  static bool fits(std::size_t description, std::size_t offsets);
  /// Sends a header, without its description if that does not fit. Throws c10::ValueError if its
  /// offsets do not.
  void send(int peer, const KeyedHeader& header);
  /// Headers that are still under way. Throws the error of one that failed.
  std::size_t pending();
  /// The next header and its sender; waits so long for it, 0: not at all. Interruptible by
  /// signals.
  std::optional<std::pair<int, KeyedHeader>> next(std::chrono::milliseconds timeout);
  /// Cancels the receive that waits for the next header. One that has come meanwhile stays.
  void cancel();

 private:
  KeyedHeader read() const;

  const c10::intrusive_ptr<DreamBackend> backend_;
  const int tag_;
  const Cargo buffer_;
  std::shared_ptr<Completion> posted_;
  std::deque<std::shared_ptr<Completion>> sends_;
};

}  // namespace dreamcomm
