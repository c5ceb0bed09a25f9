#include "transport/bootstrap/rank_info.h"

#include <sstream>

#include "core/error.h"
#include "transport/window.h"

namespace dreamcomm {
std::string to_text(const Card& card) {
  // The first three are at their places in all versions, for those that differ.
  std::string text = concat("dreamcomm ", card.version, ' ', card.host, ' ', card.rank, ' ',
                            card.size, ' ', card.page_bytes, ' ', card.message_bytes, ' ',
                            !card.refusal.empty(), ' ', hex(card.nonce), ' ', card.heap_bytes, ' ',
                            hex(card.heap), ' ', card.socket, ' ', card.settings.size());
  for (const std::string& setting : card.settings) text += concat(' ', setting);
  return concat(text, ' ', card.refusal);
}

Card card_from(const std::string& text, int rank) {
  Card card;
  std::string magic;
  std::string nonce;
  std::string heap;
  bool refuses = false;
  std::istringstream in(text);
  in >> magic >> card.version >> card.host;
  check(in && magic == "dreamcomm", ErrorKind::kMismatch, "rank ", rank,
        " published no dreamcomm address; do all ranks use the same backend?");
  check(card.version == kProtocolVersion, ErrorKind::kMismatch, "rank ", rank, " on host ",
        card.host, " runs a dreamcomm with protocol ", card.version,
        ", this rank one with protocol ", kProtocolVersion,
        "; install the same version everywhere");
  std::size_t settings = 0;
  in >> card.rank >> card.size >> card.page_bytes >> card.message_bytes >> refuses >> nonce >>
      card.heap_bytes >> heap >> card.socket >> settings;
  for (std::string setting; card.settings.size() < settings && in >> setting;) {
    card.settings.push_back(setting);
  }
  check(in && card.rank == rank && from_hex(nonce, card.nonce) && from_hex(heap, card.heap),
        ErrorKind::kMismatch, "the address published by rank ", rank, " cannot be read: ", text);
  if (refuses) std::getline(in >> std::ws, card.refusal);
  return card;
}

}  // namespace dreamcomm
