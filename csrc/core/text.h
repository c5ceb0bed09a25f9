// Text in fields of fixed size, as processes hand it to each other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>

namespace dreamcomm {

/// Writes what fits, in whole characters of UTF-8 and with a zero behind it: half a character
/// would make Python refuse the error that shows it. `field` holds one char at the least.
inline void put_text(std::span<char> field, std::string_view text) {
  const auto goes_on = [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U; };
  std::size_t length = std::min(text.size(), field.size() - 1);
  if (length < text.size()) {
    while (length > 0 && goes_on(text[length])) --length;
  }
  std::copy_n(text.data(), length, field.data());
  field[length] = '\0';
}

}  // namespace dreamcomm
