#include "transport/bootstrap/setup_board.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/request.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

/// How long a wait for one rank may last before it checks for errors of another.
constexpr milliseconds kLook{500};
/// How long a rank waits for the others to see a mismatch.
constexpr milliseconds kStay{3000};

}  // namespace

SetupBoard::SetupBoard(Store& store, int rank, int size, milliseconds timeout, Lost lost,
                       std::string group, RankNumbering numbers)
    : store_(store),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      deadline_(deadline_in(Clock::now(), timeout)),
      lost_(std::move(lost)),
      group_(std::move(group)),
      numbers_(std::move(numbers)) {}

std::string SetupBoard::where() const {
  return concat("setting up ", group_, " on rank ", numbers_.of(rank_), " of ",
                numbers_.size(size_), ": ");
}

milliseconds SetupBoard::left() const {
  const auto rest = std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now());
  return std::max(rest, milliseconds(1));
}

void SetupBoard::publish(const char* what, const std::string& value) {
  store_.set(concat(what, '/', rank_), value);
}

std::string SetupBoard::get(const char* what, int r) {
  const std::string key = concat(what, '/', r);
  while (true) {
    try {
      return store_.get(key, std::min(left(), kLook));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
      look_for_trouble();
      if (const std::string lost = lost_(r); !lost.empty()) {
        look_for_trouble();  // the rank may have reported its error before it ended
        if (store_.has(key) && Clock::now() < deadline_) continue;  // or arrived and left since
        throw Error(ErrorKind::kPeerLost, concat(where(), lost));
      }
      check(Clock::now() < deadline_, ErrorKind::kTimeout, where(), "rank ", numbers_.of(r),
            " has not come within the timeout of ", timeout_.count(),
            " ms. All ranks must make the group (", error.what(), ')');
    }
  }
}

bool SetupBoard::await(const std::function<bool(Deadline)>& done) {
  while (!done(std::min(deadline_, Clock::now() + kLook))) {
    if (Clock::now() >= deadline_) return false;
    look_for_trouble();
  }
  return true;
}

/// Reads the key with a short wait, which Ctrl-C can also end.
void SetupBoard::look_for_trouble() {
  std::string trouble;
  try {
    trouble = store_.get("trouble", milliseconds(1));
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout) return;
    throw;
  }
  throw Error(ErrorKind::kPeerLost, concat(where(), trouble));
}

void SetupBoard::abort(const Error& error) {
  try {
    publish_trouble(error);
    if (error.kind() == ErrorKind::kMismatch) wait_until_seen();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // The store has failed, or some rank does not confirm in time. The error that this rank found
    // before is the one to report.
  }
}

void SetupBoard::publish_trouble(const Error& error) {
  if (!store_.has("trouble")) {
    store_.set("trouble",
               concat("rank ", numbers_.of(rank_), " could not set the group up: ", error.what()));
  }
  publish("seen", "");
}

void SetupBoard::wait_until_seen() {
  const Deadline end = deadline_in(Clock::now(), kStay);
  for (int r = 0; r < size_; ++r) {
    const auto rest = std::chrono::duration_cast<milliseconds>(end - Clock::now());
    store_.get(concat("seen/", r), std::max(rest, milliseconds(1)));
  }
}

}  // namespace dreamcomm
