// Bytes that cannot be guessed.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace dreamcomm {

using Nonce = std::array<std::uint8_t, 16>;

/// Creates one: it proves that a mapping is the rank's own. Throws Error(kSystem) if the system has
/// none.
Nonce make_nonce();

std::string hex(const Nonce& nonce);
/// True if the text is a nonce in hexadecimal digits; if so, `nonce` is set.
bool from_hex(const std::string& text, Nonce& nonce);

}  // namespace dreamcomm
