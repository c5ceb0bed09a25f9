// The facts that a rank publishes about itself through the store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/os/nonce.h"

namespace dreamcomm {

struct RankInfo {
  std::uint32_t version = 0;
  int rank = 0;
  int size = 0;
  std::size_t page_bytes = 0;
  std::size_t message_bytes = 0;
  std::string refusal;  // why it takes part in no shared memory, to follow "rank N", or nothing
  Nonce nonce{};
  std::size_t heap_bytes = 0;         // 0: the rank has no heap
  Nonce heap{};                       // the heap's id
  std::string socket;                 // abstract address it listens at
  std::string host;                   // for messages only
  std::vector<std::string> settings;  // ShmOptions::settings
};

std::string to_text(const RankInfo& info);
/// Throws Error(kMismatch) if the text is not a rank info of this version.
RankInfo rank_info_from(const std::string& text, int rank);

}  // namespace dreamcomm
