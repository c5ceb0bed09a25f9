// The first message of a rank on a connection to another.
#pragma once

#include <array>
#include <cstdint>

#include "transport/os/nonce.h"
#include "transport/window.h"

namespace dreamcomm {

struct Handshake {
  std::array<char, 12> magic{'d', 'r', 'e', 'a', 'm', 'c', 'o', 'm', 'm', 0, 0, 0};
  std::uint32_t version = kProtocolVersion;
  std::uint32_t from = 0;
  Nonce sender{};
  Nonce receiver{};  // the nonce of the rank it is meant for: other processes do not know it
};

}  // namespace dreamcomm
