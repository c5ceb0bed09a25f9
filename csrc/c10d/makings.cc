#include "c10d/makings.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "core/error.h"

namespace dreamcomm {
namespace {

std::string key_of(int rank) { return concat("makes/", rank); }

constexpr const char* kFailed = "failed";

/// State, number and members, with spaces between.
std::string to_text(const Making& making) {
  std::string text = concat(making.failed ? kFailed : "makes", ' ', making.number);
  for (const int member : making.members) text += concat(' ', member);
  return text;
}

std::optional<Making> making_from(const std::string& text) {
  std::istringstream in(text);
  std::string state;
  Making making;
  if (!(in >> state >> making.number)) return std::nullopt;
  making.failed = state == kFailed;
  for (int member = 0; in >> member;) making.members.push_back(member);
  return making;
}

/// "makes group '1' of ranks 0, 1"
std::string words_on(const Making& making) {
  constexpr std::size_t kMostNamed = 16;
  std::string text = concat(making.failed ? "has failed to make" : "makes", " group '",
                            making.number, "' of ranks ");
  for (std::size_t i = 0; i < std::min(making.members.size(), kMostNamed); ++i) {
    text += concat(i == 0 ? "" : ", ", making.members[i]);
  }
  return text + (making.members.size() > kMostNamed ? ", ..." : "");
}

}  // namespace

Makings::Makings(int rank, std::shared_ptr<StoreClerk> clerk)
    : rank_(rank), clerk_(std::move(clerk)) {}

void Makings::begin(Making making) {
  const std::scoped_lock lock(mutex_);
  begun_.insert(making.number);
  current_ = std::move(making);
  if (posted_) post();
}

void Makings::end(bool made) {
  const std::scoped_lock lock(mutex_);
  current_->failed = !made;
  if (!made) post();
  current_.reset();
}

/// Under the lock.
void Makings::post() {
  posted_ = true;
  clerk_->post(key_of(rank_), to_text(*current_));
}

std::string Makings::contradiction(int other) {
  {
    const std::scoped_lock lock(mutex_);
    if (!current_) return "";
    if (!posted_) post();
  }
  const std::optional<Making> theirs = making_from(clerk_->read(key_of(other)).value_or(""));
  const std::scoped_lock lock(mutex_);
  if (!theirs || !current_) return "";
  return judge(other, *theirs);
}

/// Under the lock.
std::string Makings::judge(int other, const Making& theirs) const {
  const std::vector<int>& members = theirs.members;
  const bool has_passed = theirs.number > current_->number;
  const bool differs =
      theirs.number == current_->number && (theirs.failed || members != current_->members);
  const bool was_left_out = theirs.number < current_->number && !begun_.contains(theirs.number) &&
                            std::find(members.begin(), members.end(), rank_) != members.end();
  if (!has_passed && !differs && !was_left_out) return "";
  return concat("the ranks of the job make groups in different orders: rank ", rank_, ' ',
                words_on(*current_), ", and rank ", other, ' ', words_on(theirs),
                ". All ranks must make all groups in one order");
}

}  // namespace dreamcomm
