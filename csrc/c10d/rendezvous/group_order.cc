#include "c10d/rendezvous/group_order.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <utility>

#include "core/error.h"

namespace dreamcomm {
namespace {

std::string key_of(int rank) { return concat("makes/", rank); }

constexpr const char* kMakes = "makes";
constexpr const char* kFailed = "failed";
constexpr const char* kContradicted = "contradicted";

/// State, name, turn and members, with spaces between.
std::string to_text(const GroupRecord& record) {
  const char* const state = !record.failed ? kMakes : record.contradicted ? kContradicted : kFailed;
  std::string text = concat(state, ' ', record.name, ' ', record.turn);
  for (const int member : record.members) text += concat(' ', member);
  return text;
}

std::optional<GroupRecord> record_from(const std::string& text) {
  std::istringstream in(text);
  std::string state;
  GroupRecord record;
  if (!(in >> state >> record.name >> record.turn)) return std::nullopt;
  record.failed = state != kMakes;
  record.contradicted = state == kContradicted;
  for (int member = 0; in >> member;) record.members.push_back(member);
  return record;
}

/// "makes group '1' of ranks 0, 1"
std::string describe_record(const GroupRecord& record) {
  constexpr std::size_t kMostNamed = 16;
  std::string text = concat(record.failed ? "has failed to make" : "makes", " group '", record.name,
                            "' of ranks ");
  for (std::size_t i = 0; i < std::min(record.members.size(), kMostNamed); ++i) {
    text += concat(i == 0 ? "" : ", ", record.members[i]);
  }
  return text + (record.members.size() > kMostNamed ? ", ..." : "");
}

bool contains(const std::vector<int>& members, int rank) {
  return std::find(members.begin(), members.end(), rank) != members.end();
}

constexpr const char* kOrders = "the ranks of the job make groups in different orders: ";

}  // namespace

std::optional<std::int64_t> GroupRecord::number() const {
  std::int64_t counted = 0;
  const char* const past = name.data() + name.size();
  const auto [end, error] = std::from_chars(name.data(), past, counted);
  return error == std::errc() && end == past ? std::optional(counted) : std::nullopt;
}

bool GroupRecord::is_hashed() const {
  constexpr std::size_t kDigits = 40;  // of SHA-1
  return name.size() == kDigits && name.find_first_not_of("0123456789abcdef") == std::string::npos;
}

GroupOrder::GroupOrder(int rank, std::shared_ptr<StoreWorker> worker)
    : rank_(rank), worker_(std::move(worker)) {}

void GroupOrder::begin(GroupRecord record) {
  const std::scoped_lock lock(mutex_);
  record.turn = ++begun_[record.name];
  current_ = std::move(record);
  if (posted_) post();
}

void GroupOrder::end(bool made) {
  const std::scoped_lock lock(mutex_);
  if (!current_) return;  // two threads made groups, and the other's has ended
  current_->failed = !made;
  if (!made) post();
  current_.reset();
}

/// Under the lock.
void GroupOrder::post() {
  posted_ = true;
  worker_->post(key_of(rank_), to_text(*current_));
}

std::string GroupOrder::contradiction(int other) {
  {
    const std::scoped_lock lock(mutex_);
    if (!current_) return "";
    if (!posted_) post();
  }
  const std::optional<GroupRecord> theirs = record_from(worker_->read(key_of(other)).value_or(""));
  const std::scoped_lock lock(mutex_);
  if (!theirs || !current_) return "";
  std::string found = judge(other, *theirs);
  current_->contradicted = !found.empty();
  return found;
}

/// Under the lock, as all functions below.
bool GroupOrder::has_begun(const GroupRecord& theirs) const {
  const auto found = begun_.find(theirs.name);
  return found != begun_.end() && found->second >= theirs.turn;
}

std::string GroupOrder::judge(int other, const GroupRecord& theirs) const {
  const bool have_numbers = theirs.number() && current_->number();
  return have_numbers ? judge_numbers(other, theirs) : judge_names(other, theirs);
}

std::string GroupOrder::judge_numbers(int other, const GroupRecord& theirs) const {
  const std::vector<int>& members = theirs.members;
  const std::int64_t number = *theirs.number();
  const bool has_passed = number > *current_->number();
  const bool differs =
      number == *current_->number() && (theirs.failed || members != current_->members);
  const bool was_left_out =
      number < *current_->number() && !has_begun(theirs) && contains(members, rank_);
  if (!has_passed && !differs && !was_left_out) return "";
  return concat(kOrders, "rank ", rank_, ' ', describe_record(*current_), ", and rank ", other, ' ',
                describe_record(theirs), ". ", kMembersAlone);
}

std::string GroupOrder::judge_names(int other, const GroupRecord& theirs) const {
  if (theirs.failed && !theirs.contradicted) return "";  // it may still take part
  if (theirs.name == current_->name) return "";
  if (has_begun(theirs) || !contains(theirs.members, rank_)) return "";
  if (theirs.members != current_->members) {
    return concat(kOrders, "rank ", rank_, ' ', describe_record(*current_), ", and rank ", other,
                  ' ', describe_record(theirs),
                  ". All members of two groups must make them in one order");
  }
  return concat(
      "the ranks give one group different names: rank ", rank_, ' ', describe_record(*current_),
      ", and rank ", other, ' ', describe_record(theirs),
      ". With use_local_synchronization=True torch hashes into the name how many groups a "
      "rank is in: all members must be in equally many when they make one; else let all "
      "ranks of the job make it, without that option");
}

}  // namespace dreamcomm
