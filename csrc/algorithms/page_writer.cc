#include "algorithms/page_writer.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>

#include "kernels/stream.h"

namespace dreamcomm {
namespace {

constexpr std::size_t kLeast = std::size_t{8} << 10;  // smaller ones gain nothing
constexpr std::uint32_t kTimed = 8;                   // one of so many writes is timed
constexpr std::uint32_t kTried = 64;                  // one of so many goes the other way
/// What is written past the caches is read from further away.
constexpr double kReadersShare = 1.5;

void write_in(bool past, std::byte* to, const std::byte* from, std::size_t bytes) {
  if (past) {
    stream_copy(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace

/// Quick to believe a better time; a worse one may be that of a thread that lost its
/// processor, or of memory that was touched for the first time.
void PageWriter::Way::learn(double sample) {
  if (cost == 0 || sample < cost) {
    cost = sample;
  } else {
    cost += 0.5 * (std::min(sample, 3 * cost) - cost);
  }
}

bool PageWriter::SizeClass::prefers_past() const {
  return past.cost != 0 && kReadersShare * past.cost < plain.cost;
}

void PageWriter::write(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes < kLeast) {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return;
  }
  const auto width = static_cast<std::size_t>(std::bit_width(bytes / kLeast));
  SizeClass& similar = classes_[std::min(width, classes_.size()) - 1];
  const std::uint32_t number = ++similar.count;
  // Often at first, after both pages have been touched, then seldom.
  const bool tries = number % kTried == 0 || (number >= 4 && std::has_single_bit(number));
  const bool past = similar.prefers_past() != tries;
  ++writes_;
  if (past) ++streamed_;
  if (!tries && number % kTimed != 1) return write_in(past, to, from, bytes);
  const auto begin = std::chrono::steady_clock::now();
  write_in(past, to, from, bytes);
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
  (past ? similar.past : similar.plain).learn(time.count() / static_cast<double>(bytes));
}

}  // namespace dreamcomm
