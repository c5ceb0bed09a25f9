// What the ranks of a group read of each other while they set it up.
#include "transport/bootstrap/setup_board.h"

#include <doctest.h>

#include <map>
#include <string>

namespace dreamcomm::testing {
namespace {

using std::chrono::milliseconds;

/// The first wait for a key ends before it looks, as that of a process that was stopped may.
class LateStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override { values_[key] = value; }
  bool has(const std::string& key) override { return values_.contains(key); }
  std::string get(const std::string& key, milliseconds) override {
    if (waits_++ == 0 || !has(key)) throw Error(ErrorKind::kTimeout, "no key");
    return values_.at(key);
  }

 private:
  std::map<std::string, std::string> values_;
  int waits_ = 0;
};

TEST_CASE("a rank that has arrived, and makes another group since, is not missed") {
  LateStore store;
  const auto other_group = [](int) { return "rank 1 makes another group"; };
  SetupBoard board(store, 0, 2, std::chrono::seconds(30), other_group);
  CHECK_THROWS_WITH_AS(board.get("card", 1),
                       "setting up a group on rank 0 of 2: rank 1 makes another group", Error);
  LateStore again;
  again.set("card/1", "here");
  SetupBoard arrived(again, 0, 2, std::chrono::seconds(30), other_group);
  CHECK(arrived.get("card", 1) == "here");
}

TEST_CASE("a wait that does not use the store also ends with another rank's error") {
  LateStore store;
  SetupBoard board(store, 0, 2, std::chrono::seconds(30), [](int) { return ""; });
  int looks = 0;
  CHECK(board.await([&](SetupBoard::Deadline) { return ++looks == 2; }));
  store.set("trouble", "rank 1 was interrupted");
  CHECK_THROWS_WITH_AS(board.await([](SetupBoard::Deadline) { return false; }),
                       "setting up a group on rank 0 of 2: rank 1 was interrupted", Error);
  SetupBoard late(store, 0, 2, std::chrono::milliseconds(0), [](int) { return ""; });
  CHECK(!late.await([](SetupBoard::Deadline) { return false; }));
}

TEST_CASE("a part of a group numbers ranks as the group does") {
  LateStore store;
  const RankNumbering numbers({4, 7}, 9);
  SetupBoard board(store, 1, 2, milliseconds(0), [](int) { return ""; }, "the part", numbers);
  CHECK_THROWS_WITH_AS(board.get("card", 0),
                       "setting up the part on rank 7 of 9: rank 4 has not come within the timeout "
                       "of 0 ms. All ranks must make the group (no key)",
                       Error);
  board.abort(Error(ErrorKind::kSystem, "no memory"));
  CHECK(store.get("trouble", milliseconds(0)) == "rank 7 could not set the group up: no memory");
}

}  // namespace
}  // namespace dreamcomm::testing
