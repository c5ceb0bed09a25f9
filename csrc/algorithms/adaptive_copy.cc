#include "algorithms/adaptive_copy.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/transfer/stream.h"

namespace dreamcomm {
namespace {

constexpr std::uint32_t kInARow = AdaptiveCopy::kInARow;
constexpr std::size_t kLeast = std::size_t{8} << 10;  // smaller ones gain nothing

/// How a new time changes the average. In rounds of work it is a plain average, in which one late
/// peer does not make a way look slow. A trial has only a few rounds, some of which find pages and
/// tensors where the other way has left them: there a shorter time counts more. A way that a trial
/// measured too fast shows its average as soon as it is used.
struct Weight {
  double shorter;  // of a time below the average
  double longer;   // of one above it
  double most;     // a longer one counts as so many times the average
};
constexpr Weight kInWork{0.1, 0.1, 2};
constexpr Weight kInTrial{0.5, 0.1, 2};

/// The purpose of a round, the same on all ranks. kInARow rounds have the same purpose. A hash
/// chooses it, so that no rhythm of a program's calls hits it always or never.
enum class Purpose { kWork, kTryPlain, kTryPast };

Purpose purpose_of(std::uint32_t round) {
  const std::uint32_t slot = (round / kInARow * 0x9E3779B1U) >> 26U;  // of 64
  if (slot == 0) return Purpose::kTryPlain;
  return slot == 1 ? Purpose::kTryPast : Purpose::kWork;
}

}  // namespace

void AdaptiveCopy::Way::learn(double sample, bool trial) {
  const Weight& weight = trial ? kInTrial : kInWork;
  if (cost == 0) {
    cost = sample;
  } else if (sample < cost) {
    cost += weight.shorter * (sample - cost);
  } else {
    cost += weight.longer * (std::min(sample, weight.most * cost) - cost);
  }
}

AdaptiveCopy::Sizes AdaptiveCopy::wishes() const {
  Sizes wished = 0;
  for (std::size_t i = 0; i < classes_.size(); ++i) {
    if (classes_[i].prefers_past()) wished = static_cast<Sizes>(wished | 1U << i);
  }
  return wished;
}

void AdaptiveCopy::open(std::uint32_t round, std::size_t bytes) {
  close();
  const auto width = static_cast<std::size_t>(std::bit_width(bytes / kLeast));
  const std::size_t index = std::min(width, classes_.size()) - 1;
  similar_ = &classes_[index];
  round_ = round;
  bytes_ = 0;
  Purpose purpose = purpose_of(round);
  // At first each way is tried a few times, alternately.
  const std::uint32_t number = similar_->rounds++;
  const bool first = number < kTrials;
  if (first) purpose = number / kInARow % 2 == 0 ? Purpose::kTryPlain : Purpose::kTryPast;
  trial_ = purpose != Purpose::kWork;
  past_ = (past_sizes_ >> index & 1U) != 0;
  if (purpose == Purpose::kTryPlain) past_ = false;
  if (purpose == Purpose::kTryPast) past_ = true;
  // After a change of the way, the first rounds move pages and tensors to where that way leaves
  // them in the caches. That takes longer than either way.
  if (past_ != similar_->past_lately) similar_->in_a_row = 0;
  similar_->past_lately = past_;
  timed_ = similar_->in_a_row++ >= kSettling;
  if (timed_) begin_ = now_();
}

void AdaptiveCopy::close() {
  if (similar_ != nullptr && timed_) {
    const std::chrono::duration<double, std::nano> time = now_() - begin_;
    Way& way = past_ ? similar_->past : similar_->plain;
    way.learn(time.count() / static_cast<double>(bytes_), trial_);
  }
  similar_ = nullptr;
}

void AdaptiveCopy::write(std::uint32_t round, std::byte* to, const std::byte* from,
                         std::size_t bytes) {
  const bool goes_on = similar_ != nullptr && round == round_;
  if (!goes_on && bytes < kLeast) {
    close();
    if (bytes > 0) std::memcpy(to, from, bytes);
    return;
  }
  if (!goes_on) open(round, bytes);
  bytes_ += bytes;
  writes_.add(1);
  if (past_) {
    streamed_.add(1);
    stream_copy(to, from, bytes);
  } else if (bytes > 0) {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace dreamcomm
