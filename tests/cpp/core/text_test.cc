// Text in fields of fixed size.
#include "core/text.h"

#include <doctest.h>

#include <array>
#include <string>

#include "comm/rank_state.h"

namespace dreamcomm {
namespace {

template <std::size_t N>
std::string put(std::string_view text) {
  std::array<char, N> field;
  field.fill('?');
  put_text(field, text);
  CHECK(field[std::char_traits<char>::length(field.data())] == '\0');
  return field.data();
}

TEST_CASE("text that fits is kept, and other text cut") {
  CHECK(put<4>("").empty());
  CHECK(put<4>("abc") == "abc");
  CHECK(put<4>("abcd") == "abc");
  CHECK(put<1>("abcd").empty());
}

TEST_CASE("a short time is shown in milliseconds") {
  CHECK(in_seconds(std::chrono::milliseconds(0)) == "0 ms");
  CHECK(in_seconds(std::chrono::milliseconds(50)) == "50 ms");
  CHECK(in_seconds(std::chrono::milliseconds(100)) == "0.1 s");
  CHECK(in_seconds(std::chrono::milliseconds(3140)) == "3.1 s");
}

TEST_CASE("no character is cut in two") {
  const std::string two = "\xc3\xa9";
  const std::string three = "\xe4\xbd\x9c";
  const std::string four = "\xf0\x9f\x8c\x8d";
  CHECK(put<4>(two + two) == two);
  CHECK(put<5>(two + two) == two + two);
  for (const std::string& one : {three, four}) {
    CHECK(put<4>("a" + one) == "a");
    CHECK(put<6>("a" + one) == "a" + one);
    CHECK(put<6>(one + one) == one);
  }
}

}  // namespace
}  // namespace dreamcomm
