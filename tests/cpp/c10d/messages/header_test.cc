// The form of a header.
#include "c10d/messages/header.h"

#include <doctest.h>

#include "cpp/support/expected_errors.h"

namespace dreamcomm::testing {
namespace {

using Message = std::array<std::byte, KeyedHeader::kBytes>;

KeyedHeader header_of(std::size_t description, std::size_t offsets) {
  KeyedHeader header;
  header.key = {1, -2, std::int64_t{1} << 40, 0, 5};
  header.size = 123456;
  header.description = std::string(description, 'x');
  for (std::size_t i = 0; i < offsets; ++i) {
    header.offsets.push_back(static_cast<std::int64_t>(i) - 1);
  }
  return header;
}

TEST_CASE("a header is read as it was written") {
  for (const std::size_t description : {0, 1, 100, 800}) {
    for (const std::size_t offsets : {0, 1, 12}) {
      CAPTURE(description);
      CAPTURE(offsets);
      const KeyedHeader header = header_of(description, offsets);
      Message message{};
      header.write(message.data());
      const KeyedHeader read = KeyedHeader::read(message.data());
      CHECK(read.key == header.key);
      CHECK(read.size == header.size);
      CHECK(read.description == header.description);
      CHECK(read.offsets == header.offsets);
    }
  }
}

TEST_CASE("a header fits up to its last byte, and no further") {
  std::size_t most = 0;
  while (KeyedHeader::fits(most + 1, 2)) ++most;
  REQUIRE(KeyedHeader::fits(most, 2));
  Message message{};
  header_of(most, 2).write(message.data());
  CHECK(KeyedHeader::read(message.data()).description.size() == most);
  const Caught error = caught([&] { header_of(most + 1, 2).write(message.data()); });
  CHECK_NOTHROW(expect(error, ErrorKind::kInvalid, {"2 offsets is too long"}));
}

TEST_CASE("bytes that are no header are refused") {
  Message message{};
  const auto read = [&] { KeyedHeader::read(message.data()); };
  CHECK_NOTHROW(expect(caught(read), ErrorKind::kMismatch, {"is the tag used by another program"}));
  header_of(10, 1).write(message.data());
  message[8] = message[9] = std::byte{0xff};  // the description's length
  CHECK_NOTHROW(expect(caught(read), ErrorKind::kMismatch, {"no header"}));
}

}  // namespace
}  // namespace dreamcomm::testing
