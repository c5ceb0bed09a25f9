#include "transport/bootstrap/rank_info.h"

#include <sstream>

#include "core/error.h"
#include "transport/window.h"

namespace dreamcomm {
std::string to_text(const RankInfo& info) {
  // The first three fields have the same places in all versions, so that versions can be compared.
  std::string text = concat("dreamcomm ", info.version, ' ', info.host, ' ', info.rank, ' ',
                            info.size, ' ', info.page_bytes, ' ', info.message_bytes, ' ',
                            !info.refusal.empty(), ' ', hex(info.nonce), ' ', info.heap_bytes, ' ',
                            hex(info.heap), ' ', info.socket, ' ', info.settings.size());
  for (const std::string& setting : info.settings) text += concat(' ', setting);
  return concat(text, ' ', info.refusal);
}

RankInfo rank_info_from(const std::string& text, int rank) {
  RankInfo info;
  std::string magic;
  std::string nonce;
  std::string heap;
  bool refuses = false;
  std::istringstream in(text);
  in >> magic >> info.version >> info.host;
  check(in && magic == "dreamcomm", ErrorKind::kMismatch, "rank ", rank,
        " published no dreamcomm address; do all ranks use the same backend?");
  check(info.version == kProtocolVersion, ErrorKind::kMismatch, "rank ", rank, " on host ",
        info.host, " runs a dreamcomm with protocol ", info.version,
        ", this rank one with protocol ", kProtocolVersion,
        "; install the same version everywhere");
  std::size_t settings = 0;
  in >> info.rank >> info.size >> info.page_bytes >> info.message_bytes >> refuses >> nonce >>
      info.heap_bytes >> heap >> info.socket >> settings;
  for (std::string setting; info.settings.size() < settings && in >> setting;) {
    info.settings.push_back(setting);
  }
  check(in && info.rank == rank && from_hex(nonce, info.nonce) && from_hex(heap, info.heap),
        ErrorKind::kMismatch, "the address published by rank ", rank, " cannot be read: ", text);
  if (refuses) std::getline(in >> std::ws, info.refusal);
  return info;
}

}  // namespace dreamcomm
