// Packs of sixteen bytes, the most that a lane reads or writes in one access.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/collectives/device.h"

namespace dreamcomm::gpu {

inline constexpr std::size_t kPackBytes = 16;

template <typename E>
struct alignas(kPackBytes) Pack {
  static constexpr int kItems = static_cast<int>(kPackBytes / sizeof(E));
  E item[kItems];
};

/// True if all of a tensor's packs can be accessed whole.
DREAMCOMM_DEVICE bool is_packed(const std::byte* data) {
  return reinterpret_cast<std::uintptr_t>(data) % kPackBytes == 0;
}

}  // namespace dreamcomm::gpu
