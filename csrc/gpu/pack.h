// Sixteen bytes at a time, the most that a lane reads or writes in one access.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/device.h"

namespace dreamcomm::gpu {

inline constexpr std::size_t kPackBytes = 16;

template <typename E>
struct alignas(kPackBytes) Pack {
  static constexpr int kItems = static_cast<int>(kPackBytes / sizeof(E));
  E item[kItems];
};

/// Whether all of a tensor's packs can be accessed whole.
DREAMCOMM_DEVICE bool is_packed(const std::byte* data) {
  return reinterpret_cast<std::uintptr_t>(data) % kPackBytes == 0;
}

/// Pack `index` from `data` on; an unaligned one item by item.
template <bool kAligned, typename E>
DREAMCOMM_DEVICE Pack<E> load(const std::byte* data, std::size_t index) {
  if constexpr (kAligned) {
    return reinterpret_cast<const Pack<E>*>(data)[index];
  } else {
    Pack<E> pack;
    const E* from = reinterpret_cast<const E*>(data) + index * Pack<E>::kItems;
    for (int i = 0; i < Pack<E>::kItems; ++i) pack.item[i] = from[i];
    return pack;
  }
}

template <bool kAligned, typename E>
DREAMCOMM_DEVICE void store(std::byte* data, std::size_t index, const Pack<E>& pack) {
  if constexpr (kAligned) {
    reinterpret_cast<Pack<E>*>(data)[index] = pack;
  } else {
    E* to = reinterpret_cast<E*>(data) + index * Pack<E>::kItems;
    for (int i = 0; i < Pack<E>::kItems; ++i) to[i] = pack.item[i];
  }
}

}  // namespace dreamcomm::gpu
