// How a call between hosts begins: all ranks find out whether they make the same one, and small
// ones are over with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "algorithms/signature.h"
#include "internode/collectives/link_context.h"

namespace dreamcomm {

/// What all_to_all brings for a rank: the bytes that it gives each rank, and those it expects.
constexpr std::size_t table_bytes(int size) {
  return 2 * sizeof(std::uint64_t) * static_cast<std::size_t>(size);
}

/// And all of them for the ranks of a host, at the most.
std::size_t host_table_bytes(const Topology& topology);

/// Why a call cannot be, though all ranks make it alike, and between whom.
struct Mismatch {
  std::string text;
  int one;
  int other;
};

/// A part of a call that is over with its opening: what the leaders (local index 0) exchange.
struct LeaderPayload {
  std::size_t brought = 0;  // bytes from each host
  std::size_t told = 0;     // bytes to every rank
  /// Fills what this rank's host brings; called on every rank, once all ranks of the host were
  /// found to make one call. Counts on leaders.
  std::function<void(std::byte* brought)> bring{};
  /// On leaders, of what each host brought: what all ranks are told.
  std::function<void(std::span<const std::byte* const> brought, std::byte* told)> judge{};
  /// On every rank. All object to the same, or none.
  std::function<std::optional<Mismatch>(const std::byte* told)> take{};
};

/// What is said of who calls where calls differ.
struct Caller {
  const std::string& group;                  // "group '1'", or "" where it need not be told
  const std::function<std::string()>& site;  // where the call was made; may be null
};

/// Returns when all ranks have called; a barrier. `own` is this rank's call. Throws
/// Error(kMismatch) on every rank if two differ: it names the first rank and the first that
/// differs from it.
void handshake(LinkContext& context, const Signature& own, const Caller& caller,
               const LeaderPayload& payload);

}  // namespace dreamcomm
