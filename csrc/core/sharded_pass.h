// One pass over parameters whose elements are shared out among the ranks: reads all ranks'
// gradients where they lie, and writes all ranks' parameters.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/types.h"

namespace dreamcomm {

/// A parameter in a sharded pass, as one rank has it. Everything except the addresses and this
/// rank's elements is the same on all ranks.
struct ShardedPart {
  bool present = false;                 // the rank has a gradient of it; none counts as zeros
  const std::byte* gradient = nullptr;  // in the rank's heap; only a pass that reads has it
  std::byte* parameter = nullptr;       // in the rank's heap; only a pass that writes has it
  DType gradient_type = DType::kFloat32;
  DType sum_type = DType::kFloat32;  // the average is computed, and given, in it
  DType parameter_type = DType::kFloat32;
  std::size_t numel = 0;    // of the whole parameter
  std::size_t begin = 0;    // the first of this rank's elements
  std::size_t count = 0;    // of this rank's elements
  bool replicated = false;  // every rank owns all elements, and writes only its own copy
};

/// A pass over averages of gradients. Not thread-safe; one rank's.
class ShardedPass {
 public:
  ShardedPass() = default;
  virtual ~ShardedPass() = default;
  ShardedPass(const ShardedPass&) = delete;
  ShardedPass& operator=(const ShardedPass&) = delete;

  virtual std::span<const ShardedPart> parts() const = 0;
  /// True if the gradients of all ranks are read.
  virtual bool reads() const = 0;
  /// True if this rank's elements of its parameter are copied into those of all ranks.
  virtual bool writes() const = 0;
  /// The average is multiplied by it, and is a sum then; 0: it is the average.
  virtual double factor() const = 0;
  /// Takes `count` of this rank's elements from `begin` on, of the whole parameter. `average`: of
  /// the gradients; null in a pass that does not read. A pass that writes has changed the
  /// parameter's elements when it returns.
  virtual void apply(std::size_t part, std::size_t begin, std::size_t count,
                     const std::byte* average) = 0;
  /// Called on all ranks before the elements of each part that any rank has a gradient of; the
  /// others are left out.
  virtual void touch(std::size_t part) = 0;
};

/// "sharded step" and the like, for people.
inline std::string_view name(const ShardedPass& pass) {
  if (!pass.writes()) return "sharded reduction";
  return pass.reads() ? "sharded step" : "sharded write";
}

/// A hash of all that has to be equal on the ranks, except the parts' number.
inline std::uint32_t digest(const ShardedPass& pass) {
  std::uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a, by words
  const auto add = [&hash](std::uint64_t value) { hash = (hash ^ value) * 0x100000001b3U; };
  add(std::bit_cast<std::uint64_t>(pass.factor()));
  add((pass.reads() ? 2U : 0U) + (pass.writes() ? 1U : 0U));
  for (const ShardedPart& part : pass.parts()) {
    add(part.numel);
    add((static_cast<std::uint64_t>(part.gradient_type) << 24U) +
        (static_cast<std::uint64_t>(part.sum_type) << 16U) +
        (static_cast<std::uint64_t>(part.parameter_type) << 8U) + (part.replicated ? 1U : 0U));
  }
  return static_cast<std::uint32_t>(hash ^ (hash >> 32U));
}

/// Bytes that all ranks' shards have together, of what the pass moves.
inline std::size_t pass_bytes(const ShardedPass& pass) {
  std::size_t bytes = 0;
  for (const ShardedPart& part : pass.parts()) {
    bytes += part.numel * item_size(pass.reads() ? part.gradient_type : part.parameter_type);
  }
  return bytes;
}

}  // namespace dreamcomm
