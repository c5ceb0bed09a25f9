#include "transport/card.h"

#include <sys/random.h>

#include <iomanip>
#include <sstream>

#include "core/error.h"
#include "transport/window.h"

namespace dreamcomm {
namespace {

std::string hex(const Nonce& nonce) {
  std::ostringstream text;
  text << std::hex << std::setfill('0');
  for (const unsigned byte : nonce) text << std::setw(2) << byte;
  return text.str();
}

bool from_hex(const std::string& text, Nonce& nonce) {
  if (text.size() != 2 * nonce.size()) return false;
  for (std::size_t i = 0; i < nonce.size(); ++i) {
    std::istringstream pair(text.substr(2 * i, 2));
    unsigned value = 0;
    if (!(pair >> std::hex >> value)) return false;
    nonce[i] = static_cast<std::uint8_t>(value);
  }
  return true;
}

}  // namespace

Nonce make_nonce() {
  Nonce nonce{};
  const auto got = getrandom(nonce.data(), nonce.size(), 0);
  check(got == static_cast<ssize_t>(nonce.size()), ErrorKind::kSystem, "getrandom failed");
  return nonce;
}

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
