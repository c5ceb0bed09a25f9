// How a call between hosts begins: all ranks find out whether they make the same call, and small
// calls end with it.
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

/// A rank's part of the table of an all_to_all: the bytes that it gives each rank, and those it
/// expects.
constexpr std::size_t table_bytes(int size) {
  return 2 * sizeof(std::uint64_t) * static_cast<std::size_t>(size);
}

/// The parts of all ranks of a host, at most.
std::size_t host_table_bytes(const Topology& topology);

/// Why a call is impossible although all ranks make it alike, and between which ranks.
struct Mismatch {
  std::string text;
  int one;
  int other;
};

/// A part of a call that ends with its opening: what the leaders (local index 0) exchange.
struct LeaderPayload {
  std::size_t brought = 0;  // bytes from each host
  std::size_t told = 0;     // bytes to every rank
  /// Fills what this rank's host brings; called on every rank, once all ranks of the host were
  /// found to make one call. Its result counts on leaders.
  std::function<void(std::byte* brought)> bring{};
  /// On leaders: turns what each host brought into what all ranks get.
  std::function<void(std::span<const std::byte* const> brought, std::byte* told)> decide{};
  /// On every rank. All return the same mismatch, or none.
  std::function<std::optional<Mismatch>(const std::byte* told)> take{};
};

/// How errors describe the caller if calls differ.
struct Caller {
  const std::string& group;                  // "group '1'", or "" if it need not be named
  const std::function<std::string()>& site;  // where the call was made; may be null
};

/// Returns when all ranks have called; a barrier. `own` is this rank's call. Throws
/// Error(kMismatch) on every rank if two differ: it names the first rank and the first that differs
/// from it.
void handshake(LinkContext& context, const Signature& own, const Caller& caller,
               const LeaderPayload& payload);

}  // namespace dreamcomm
