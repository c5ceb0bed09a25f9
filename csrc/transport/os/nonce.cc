#include "transport/os/nonce.h"

#include <sys/random.h>

#include <iomanip>
#include <sstream>

#include "core/error.h"

namespace dreamcomm {

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

Nonce make_nonce() {
  Nonce nonce{};
  const auto got = getrandom(nonce.data(), nonce.size(), 0);
  check(got == static_cast<ssize_t>(nonce.size()), ErrorKind::kSystem, "getrandom failed");
  return nonce;
}

}  // namespace dreamcomm
