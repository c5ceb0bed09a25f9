#include "kernels/transfer/stream.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace dreamcomm {

#if defined(__x86_64__)

void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kCacheLine = 64;
  const std::size_t skewed = reinterpret_cast<std::uintptr_t>(to) % kCacheLine;
  const std::size_t head = skewed == 0 ? 0 : std::min(bytes, kCacheLine - skewed);
  if (head > 0) std::memcpy(to, from, head);
  std::size_t at = head;
  for (; at + kCacheLine <= bytes; at += kCacheLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  if (at < bytes) std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();  // such stores are ordered with no others, not even with a release
}

#else

void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

#endif

}  // namespace dreamcomm
