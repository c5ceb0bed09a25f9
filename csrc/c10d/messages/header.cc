#include "c10d/messages/header.h"

#include <cstring>

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
  std::memcpy(to, &fields, sizeof(fields));
  to += sizeof(fields);
  std::memcpy(to, description.data(), fields.inside);
  std::memcpy(to + fields.inside, offsets.data(), offsets.size() * sizeof(std::int64_t));
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
  std::memcpy(header.offsets.data(), from + fields.inside, fields.offsets * sizeof(std::int64_t));
  return header;
}

}  // namespace dreamcomm
