// What a rank says first on a connection to another.
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
  Nonce receiver{};  // whom it is meant for: a stray connection cannot know
};

}  // namespace dreamcomm
