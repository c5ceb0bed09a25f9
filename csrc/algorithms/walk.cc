#include "algorithms/walk.h"

#include "core/error.h"

namespace dreamcomm {

static_assert(sizeof(Signature) <= Walk::kSignature);

Walk::Walk(Rounds& rounds, const Signature& signature, Watch& watch,
           std::span<const std::byte*> sources)
    : rounds_(rounds), signature_(signature), watch_(watch), sources_(sources) {}

void Walk::turn(Peers reads, Peers readers) {
  if (!first_) [[likely]] {
    rounds_.turn(reads, readers, watch_);
    return;
  }
  std::memcpy(rounds_.page(), &signature_, sizeof signature_);
  rounds_.turn(Peers::all(), Peers::all(), watch_);
  first_ = false;
  compare_signatures();
}

// All ranks turned the same round, so after a mismatch they stand at the same
// place again, ready for the next call.
void Walk::compare_signatures() const {
  for (int peer = 0; peer < size(); ++peer) {
    Signature theirs;
    std::memcpy(&theirs, rounds_.from(peer), sizeof theirs);
    check(theirs == signature_, ErrorKind::kMismatch, "the ranks made different calls: rank ",
          rank(), " called ", words(signature_), ", rank ", peer, " called ", words(theirs),
          ". No data was moved; the group stays usable");
  }
}

void Walk::reduce_all(const Reduction& how, const std::byte* own, std::size_t offset,
                      std::byte* out, std::size_t count) {
  for (int peer = 0; peer < size(); ++peer) {
    sources_[static_cast<std::size_t>(peer)] = peer == rank() ? own : from(peer) + offset;
  }
  reduce(how, sources_, out, count);
  count_received(static_cast<std::size_t>(size() - 1) * count * item_size(how.dtype));
}

void Walk::take(std::byte* to, int rank, std::size_t offset, std::size_t bytes) {
  copy_bytes(to, from(rank) + offset, bytes);
  count_received(bytes);
}

void Walk::give(std::size_t offset, const std::byte* data, std::size_t bytes, int readers) {
  copy_bytes(page() + offset, data, bytes);
  count_sent(bytes * static_cast<std::size_t>(readers));
}

}  // namespace dreamcomm
