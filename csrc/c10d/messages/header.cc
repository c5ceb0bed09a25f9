#include "c10d/messages/header.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "core/error.h"

namespace dreamcomm {
namespace {

constexpr std::uint32_t kMagic = 0x44434831;  // "DCH1"

/// A header's first bytes. The description follows, and then the offsets.
struct Fields {
  std::uint32_t magic = kMagic;
  std::uint32_t size = 0;
  std::uint32_t inside = 0;  // bytes of the description in this message
  std::uint32_t offsets = 0;
  std::array<std::int64_t, KeyedHeader::kKeys> key{};
};

/// Copies the bytes, which may be none at no address. Returns the end of the copy.
std::byte* append(std::byte* to, std::span<const std::byte> bytes) {
  return std::copy(bytes.begin(), bytes.end(), to);
}

}  // namespace

bool KeyedHeader::fits(std::size_t description, std::size_t offsets) {
  return description + offsets * sizeof(std::int64_t) <= kBytes - sizeof(Fields);
}

void KeyedHeader::write(std::byte* to) const {
  Fields fields;
  fields.size = size;
  fields.inside = static_cast<std::uint32_t>(description.size());
  fields.offsets = static_cast<std::uint32_t>(offsets.size());
  fields.key = key;
  check(fits(description.size(), offsets.size()), ErrorKind::kInvalid, "a header of ",
        description.size(), " bytes and ", offsets.size(), " offsets is too long");
  to = append(to, std::as_bytes(std::span(&fields, 1)));
  to = append(to, std::as_bytes(std::span(description)));
  append(to, std::as_bytes(std::span(offsets)));
}

KeyedHeader KeyedHeader::read(const std::byte* from) {
  Fields fields;
  std::memcpy(&fields, from, sizeof(fields));
  check(fields.magic == kMagic && fits(fields.inside, fields.offsets), ErrorKind::kMismatch,
        "a message under this tag is no header: is the tag used by another program?");
  from += sizeof(fields);
  KeyedHeader header;
  header.key = fields.key;
  header.size = fields.size;
  header.description.assign(reinterpret_cast<const char*>(from), fields.inside);
  header.offsets.resize(fields.offsets);
  const std::span<std::byte> offsets = std::as_writable_bytes(std::span(header.offsets));
  std::copy_n(from + fields.inside, offsets.size(), offsets.data());
  return header;
}

}  // namespace dreamcomm
