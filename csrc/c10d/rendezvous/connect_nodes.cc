#include "c10d/rendezvous/connect_nodes.h"

#include <algorithm>
#include <regex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAtOnce{0};
constexpr milliseconds kToHear{1500};  // a rank that asks a late one first waits up to a second
constexpr milliseconds kHearEvery{40};
constexpr milliseconds kForWord{500};
constexpr milliseconds kLongestRound{1000};  // of very many ranks, at a slow store

std::string connected_key(const std::string& carries, int rank) {
  return concat("connected/", carries, '/', rank);
}

std::string name_of(const Place& place, int rank) {
  return concat("rank ", rank, " of ", place.topology.words(place.topology.host_of(rank)));
}

/// The other ranks that posted nothing until that time, and that the text does not name. Nothing if
/// the store does not answer, or not for all of them in that time.
std::optional<std::vector<int>> silent(const Connection& connection, StoreWorker& worker,
                                       const AbortReasons& reasons, const std::string& told,
                                       Clock::time_point until) {
  const Place& place = connection.place;
  std::vector<int> ranks;
  if (!connection.is_nearly_over()) return ranks;
  for (int peer = 0; peer < place.topology.size(); ++peer) {
    const bool is_named = told.find(name_of(place, peer)) != std::string::npos;
    if (peer != place.rank && !is_named) ranks.push_back(peer);
  }
  const Clock::time_point end = std::max(until, Clock::now()) + kLongestRound;
  bool answers = true;  // in the last round
  const auto is_heard = [&](int peer) {
    answers = answers && Clock::now() < end;
    if (!answers) return false;
    const std::optional<std::string> found = worker.read(connected_key(connection.carries, peer));
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

std::string describe_silent(const Place& place, const std::optional<std::vector<int>>& silent) {
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

constexpr std::string_view kAborted = " has aborted the group: ";

/// True if a rank posted an error of its own, not an error that it read from another rank.
bool is_first_hand(const std::string& told) {
  return !told.empty() && told.find(kAborted) == told.rfind(kAborted);
}

/// Why another rank has failed: if some ranks are silent, as a rank of their hosts posted it.
std::string told_by_another(const Place& place, const AbortReasons& reasons,
                            const std::vector<int>& ranks) {
  const Topology& topology = place.topology;
  for (int peer = 0; peer < topology.size(); ++peer) {
    const auto is_mate = [&](int rank) { return topology.host_of(rank) == topology.host_of(peer); };
    if (peer == place.rank) continue;
    if (!ranks.empty() && std::none_of(ranks.begin(), ranks.end(), is_mate)) continue;
    const std::string told = reasons.of(peer, kAtOnce);
    if (is_first_hand(told)) return "; " + told;
  }
  return "";
}

/// Why some other rank has aborted the group: preferably the reason of the rank that failed first,
/// if the store gives it in time.
std::string first_told(const AbortReasons& reasons, int own, int size) {
  const std::string last = reasons.last();
  if (last.empty()) return "";
  const Clock::time_point end = Clock::now() + kLongestRound;
  std::string found = last.starts_with(concat("rank ", own, ' ')) ? "" : last;
  for (int rank = 0; rank < size && Clock::now() < end; ++rank) {
    const std::string told = rank == own ? "" : reasons.of(rank, kAtOnce);
    if (is_first_hand(told)) return told;
    if (found.empty()) found = told;
  }
  return found;
}

std::string describe_end(int rank) { return concat("the process of rank ", rank, " has ended"); }

/// Gloo's text names the other side, but not why the connection ended.
bool is_connection_lost(const Error& error) {
  const std::string_view words = error.what();
  return error.kind() == ErrorKind::kPeerLost && words.find(kAborted) == std::string_view::npos &&
         words.find(" has ended") == std::string_view::npos;
}

}  // namespace

/// Asks for the end of a process before it reads reasons: a rank posts its reason before it ends.
/// Reads no reasons once the time is nearly over: other ranks then post only that they have waited,
/// too.
std::function<std::string(int)> watch_on_mates(const Connection& connection,
                                               const std::function<std::string(int)>& known,
                                               const ShmResult& whole,
                                               const AbortReasons& reasons) {
  return [&connection, known, &whole, reasons](int rank) -> std::string {
    const bool ended = has_ended(whole.processes.at(static_cast<std::size_t>(rank)));
    if (std::string why = known ? known(rank) : ""; !why.empty()) return why;
    const Place& place = connection.place;
    std::string told =
        connection.is_nearly_over() ? "" : first_told(reasons, place.rank, place.topology.size());
    return told.empty() && ended ? describe_end(rank) : told;
  };
}

DeadlineStore::Watch watch_on(const Connection& connection,
                              const std::shared_ptr<Communicator>& part,
                              const std::shared_ptr<StoreWorker>& worker) {
  return [weak_part = std::weak_ptr(part), weak_worker = std::weak_ptr(worker),
          topology = connection.place.topology, rank = connection.place.rank]() -> std::string {
    const std::shared_ptr<Communicator> here = weak_part.lock();
    const std::shared_ptr<StoreWorker> store = weak_worker.lock();
    if (!here || !store) return "";
    for (const int peer : topology.ranks(topology.host_of(rank))) {
      if (here->has_ended(topology.index_of(peer))) {
        return describe_end(peer);
      }
    }
    return first_told(reasons_through(store), rank, topology.size());
  };
}

std::string cause_soon(const DeadlineStore::Watch& watch) {
  const Clock::time_point until = Clock::now() + kForWord;
  while (true) {
    std::string cause = watch();
    if (!cause.empty() || Clock::now() >= until) return cause;
    std::this_thread::sleep_for(kHearEvery);
  }
}

Fallback::Inner connect_hosts(const Connection& connection, StoreWorker& worker,
                              const AbortReasons& reasons,
                              const std::function<Fallback::Inner()>& connect) {
  const Place& place = connection.place;
  try {
    Fallback::Inner made = connect();
    worker.post(connected_key(connection.carries, place.rank), "yes");
    return made;
  } catch (const Error& error) {
    // Ranks that had connected with this one have seen its connections end.
    reasons.post_abort(place.rank, error.what());
    const std::optional<std::vector<int>> found =
        silent(connection, worker, reasons, "", Clock::now() + kToHear);
    const std::string words = error.what() + describe_silent(place, found);
    if (words != error.what()) reasons.post_abort(place.rank, words);
    const bool is_told = words.find(kAborted) != std::string::npos;
    throw Error(error.kind(),
                is_told
                    ? words
                    : words + told_by_another(place, reasons, found.value_or(std::vector<int>())));
  }
}

void first_use(const Connection& connection, StoreWorker& worker, const AbortReasons& reasons,
               const DeadlineStore::Watch& watch, const std::function<void()>& use) {
  try {
    use();
  } catch (const Error& error) {
    std::string told = error.what();
    const int rank = connection.place.rank;
    const std::string cause = is_connection_lost(error) ? cause_soon(watch) : "";
    if (!cause.empty()) told += "; " + cause;
    if (reasons.of(rank, kAtOnce).empty()) reasons.post_abort(rank, told);
    const auto found = silent(connection, worker, reasons, told, later(connection.end(), kToHear));
    throw Error(error.kind(), told + describe_silent(connection.place, found));
  }
}

std::string gloo_error_text(const std::string& text) {
  static const std::regex source(R"(\[[^\]\s]*\.(cc|h):\d+\] ?)");
  return std::regex_replace(text.substr(0, text.find('\n')), source, "");
}

}  // namespace dreamcomm
