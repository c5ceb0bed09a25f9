// The form of a header: a short message with a key. It describes tensors that follow it, or that
// lie in the sender's heap.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dreamcomm {

struct KeyedHeader {
  static constexpr int kKeys = 5;
  /// A message of so many bytes travels inside its announcement (transport/window.h).
  static constexpr std::size_t kBytes = 960;

  std::array<std::int64_t, kKeys> key{};  // what the receiver finds it by
  std::uint32_t size = 0;                 // bytes of the description
  std::string description;                // empty where it does not fit: then it follows
  std::vector<std::int64_t> offsets;      // of tensors that are placed; -1: the tensor follows

  /// True if a description of so many bytes fits, with as many offsets.
  static bool fits(std::size_t description, std::size_t offsets);
  /// Writes the header to the first of kBytes. Throws Error(kInvalid) if it does not fit.
  void write(std::byte* to) const;
  /// Throws Error(kMismatch) if the bytes are no header.
  static KeyedHeader read(const std::byte* from);
};

}  // namespace dreamcomm
