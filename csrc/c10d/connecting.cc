#include "c10d/connecting.h"

#include <algorithm>
#include <regex>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/request.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAtOnce{0};
constexpr milliseconds kToHear{1500};  // a FileStore's waits end up to a second late
constexpr milliseconds kHearEvery{40};
constexpr milliseconds kLongestRound{1000};  // of very many ranks, at a slow store

std::string connected_key(const std::string& carries, int rank) {
  return concat("connected/", carries, '/', rank);
}

class PatientStore final : public c10d::Store {
 public:
  PatientStore(StorePtr store, Clock::time_point until) : store_(std::move(store)), until_(until) {
    timeout_ = left();
  }

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<PatientStore>(store_->clone(), until_);
  }
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    store_->set(key, value);
  }
  std::vector<std::uint8_t> get(const std::string& key) override {
    wait({key});
    return store_->get(key);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return store_->add(key, value);
  }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return store_->check(keys); }
  std::int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { store_->wait(keys, left()); }
  void wait(const std::vector<std::string>& keys, const milliseconds& /*timeout*/) override {
    wait(keys);
  }
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }
  void append(const std::string& key, const std::vector<std::uint8_t>& value) override {
    store_->append(key, value);
  }
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return store_->multiGet(keys);
  }
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override {
    store_->multiSet(keys, values);
  }

 private:
  milliseconds left() const {
    constexpr milliseconds kLeast{1};  // what is there is found
    const auto left = std::chrono::duration_cast<milliseconds>(until_ - Clock::now());
    return std::max(left, kLeast);
  }

  const StorePtr store_;
  const Clock::time_point until_;
};

std::string name_of(const Place& place, int rank) {
  return concat("rank ", rank, " of ", place.topology.words(place.topology.host_of(rank)));
}

/// The other ranks of whom nothing is heard until that time, and that the text does not name; not
/// known if the store does not answer, or not for all of them in that time.
std::optional<std::vector<int>> silent(const Connection& connection, StoreClerk& clerk,
                                       const Reasons& reasons, const std::string& told,
                                       Clock::time_point until) {
  const Place& place = connection.place;
  std::vector<int> ranks;
  // Before the time is over others may connect yet.
  if (Clock::now() < connection.begin + connection.time * 9 / 10) return ranks;
  for (int peer = 0; peer < place.topology.size(); ++peer) {
    const bool is_named = told.find(name_of(place, peer)) != std::string::npos;
    if (peer != place.rank && !is_named) ranks.push_back(peer);
  }
  const Clock::time_point end = std::max(until, Clock::now()) + kLongestRound;
  bool answers = true;  // in the last round
  const auto is_heard = [&](int peer) {
    answers = answers && Clock::now() < end;
    if (!answers) return false;
    const std::optional<std::string> found = clerk.read(connected_key(connection.carries, peer));
    answers = found.has_value();
    return (found && !found->empty()) || !reasons.of(peer, kAtOnce).empty();
  };
  while (true) {
    answers = true;
    std::erase_if(ranks, is_heard);
    if (ranks.empty()) return ranks;
    if (Clock::now() >= until) return answers ? std::optional(ranks) : std::nullopt;
    if (connection.interrupt) connection.interrupt();
    std::this_thread::sleep_for(kHearEvery);
  }
}

std::string words_on(const Place& place, const std::optional<std::vector<int>>& silent) {
  constexpr std::size_t kMostNamed = 4;
  if (!silent) return "; and the store does not answer";
  const std::vector<int>& ranks = *silent;
  if (ranks.empty()) return "";
  std::string names;
  for (std::size_t i = 0; i < std::min(ranks.size(), kMostNamed); ++i) {
    names += concat(i > 0 ? ", " : "", name_of(place, ranks[i]));
  }
  if (ranks.size() > kMostNamed) names += concat(" and ", ranks.size() - kMostNamed, " more");
  return concat("; nothing was heard in that time of ", names);
}

/// Why another rank has failed: if some are silent, as a rank of their hosts tells it.
std::string told_by_another(const Place& place, const Reasons& reasons,
                            const std::vector<int>& ranks) {
  const Topology& topology = place.topology;
  for (int peer = 0; peer < topology.size(); ++peer) {
    const auto is_mate = [&](int rank) { return topology.host_of(rank) == topology.host_of(peer); };
    if (peer == place.rank) continue;
    if (!ranks.empty() && std::none_of(ranks.begin(), ranks.end(), is_mate)) continue;
    const std::string told = reasons.of(peer, kAtOnce);
    if (!told.empty()) return "; " + told;
  }
  return "";
}

}  // namespace

StorePtr patient_store(const StorePtr& store, milliseconds patience) {
  return c10::make_intrusive<PatientStore>(store, deadline_in(Clock::now(), patience));
}

Fallback::Inner connect_hosts(const Connection& connection, StoreClerk& clerk,
                              const Reasons& reasons,
                              const std::function<Fallback::Inner()>& connect) {
  const Place& place = connection.place;
  try {
    Fallback::Inner made = connect();
    clerk.post(connected_key(connection.carries, place.rank), "yes");
    return made;
  } catch (const Error& error) {
    // Those that have connected with this one have seen its connections end.
    reasons.give_up(place.rank, error.what());
    const std::optional<std::vector<int>> found =
        silent(connection, clerk, reasons, "", Clock::now() + kToHear);
    const std::string words = error.what() + words_on(place, found);
    if (words != error.what()) reasons.give_up(place.rank, words);
    throw Error(error.kind(),
                words + told_by_another(place, reasons, found.value_or(std::vector<int>())));
  }
}

void first_use(const Connection& connection, StoreClerk& clerk, const Reasons& reasons,
               const std::function<void()>& use) {
  try {
    use();
  } catch (const Error& error) {
    const std::string told = error.what();
    const Clock::time_point until = connection.begin + connection.time + kToHear;
    const auto found = silent(connection, clerk, reasons, told, until);
    throw Error(error.kind(), told + words_on(connection.place, found));
  }
}

std::string words_of_gloo(const std::string& text) {
  static const std::regex source(R"(\[[^\]\s]*\.(cc|h):\d+\] ?)");
  return std::regex_replace(text.substr(0, text.find('\n')), source, "");
}

}  // namespace dreamcomm
