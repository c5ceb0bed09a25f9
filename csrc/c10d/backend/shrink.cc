// shrink_group(): the ranks that stay make a smaller group, also after the others were lost.
#include <algorithm>
#include <functional>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/backend/backend.h"
#include "c10d/base/convert.h"
#include "c10d/base/gil_signals.h"
#include "c10d/rendezvous/torch_store.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

/// As torch.distributed has them.
constexpr int kShrinkDefault = 0;
constexpr int kShrinkAbort = 1;

/// How often a rank looks for what the others have posted.
constexpr milliseconds kLookForRanks{10};

/// "[0, 2]"
std::string listed(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += concat(text.empty() ? "" : ", ", rank);
  return concat('[', text, ']');
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

/// The ranks to exclude, each once and in order. Those that shrink_group() lets through pass.
std::vector<int> require_excludable(const Site& site, const std::vector<int64_t>& given) {
  TORCH_CHECK_VALUE(!given.empty(), site,
                    "expected 'ranks_to_exclude' to have a rank at least, got none");
  std::vector<int> ranks;
  for (const int64_t rank : given) ranks.push_back(require_rank(site, "ranks_to_exclude", rank));
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  TORCH_CHECK_VALUE(!contains(ranks, site.rank), site, "this rank is among the ones to exclude, ",
                    listed(ranks), "; only those that stay make this call");
  return ranks;
}

std::vector<int> others(const std::vector<int>& ranks, int size) {
  std::vector<int> all(static_cast<std::size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  std::erase_if(all, [&](int rank) { return contains(ranks, rank); });
  return all;
}

/// The ranks that stay post the ranks they exclude. Without agreement they would wait for each
/// other until the timeout, or make two groups of one.
class Agreement {
 public:
  /// `attempt`: this rank's count of them, which need not be its peers'. `past`: what the last
  /// one's withdraw() returned.
  Agreement(const StorePtr& store, const Site& site, const std::vector<int>& excluded,
            std::int64_t attempt, std::vector<std::string> past)
      : store_(store),
        site_(site),
        excluded_(excluded),
        own_(concat(attempt, ' ', listed(excluded))),
        past_(std::move(past)),
        said_(static_cast<std::size_t>(site.size)),
        met_(said_.size()) {
    past_.resize(said_.size());
  }

  /// Throws Error unless all that stay exclude the same ranks. Returns a name that no earlier
  /// attempts of these ranks had. `has_ended`: whether a rank's process has.
  std::string reach(milliseconds timeout, const std::function<bool(int rank)>& has_ended) {
    const Clock::time_point deadline = deadline_in(Clock::now(), timeout);
    store_.set(key(site_.rank), own_);
    while (true) {
      // Asks all again: a rank that had agreed may have been interrupted and have begun anew.
      std::vector<int> silent = others(excluded_, site_.size);
      std::erase_if(silent, [this](int rank) { return has_agreed(rank); });
      // An excluded rank should post nothing. If it does post, it excludes other ranks.
      for (const int rank : excluded_) has_agreed(rank);
      if (silent.empty()) return name();
      std::vector<int> ended = silent;
      std::erase_if(ended, [&](int rank) { return !has_ended(rank) || has_agreed(rank); });
      check(ended.empty(), ErrorKind::kPeerLost, site_, "of the ranks that stay, ", listed(ended),
            " cannot call it, as they have ended or destroyed the group; exclude them, too");
      check(Clock::now() < deadline, ErrorKind::kTimeout, site_, "of the ranks that stay, ",
            listed(blamed(silent)), " did not call it within the timeout of ", timeout.count(),
            " ms. All ranks but the excluded ", listed(excluded_),
            " must call it; exclude those that have ended, too");
      std::this_thread::sleep_for(kLookForRanks);
      check_signals();
    }
  }

  /// Marks a failed attempt as over, so that no rank takes it for one under way. Returns what all
  /// ranks have posted until now.
  std::vector<std::string> withdraw() {
    store_.set(key(site_.rank), concat(own_, kOver));
    std::vector<std::string> found(said_.size());
    for (int rank = 0; rank < site_.size; ++rank) {
      if (store_.has(key(rank)))
        found[at(rank)] = without_over(store_.get(key(rank), kLookForRanks));
    }
    return found;
  }

 private:
  /// The ranks to name: first those that never agreed. One that agreed and stopped since had waited
  /// for the others, as this rank does.
  std::vector<int> blamed(const std::vector<int>& silent) const {
    std::vector<int> never = silent;
    std::erase_if(never, [this](int rank) { return met_[at(rank)]; });
    return never.empty() ? silent : never;
  }

  static constexpr std::string_view kOver = " over";

  static std::string key(int rank) { return concat("excludes/", rank); }
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  static std::string list_in(const std::string& said) { return said.substr(said.find(' ') + 1); }
  static std::string without_over(const std::string& said) {
    return said.ends_with(kOver) ? said.substr(0, said.size() - kOver.size()) : said;
  }

  /// INVARIANT: a rank that is taken to agree has posted so in an attempt that was not over. A
  /// contradiction that ended this rank's last attempt does not end this one.
  bool has_agreed(int rank) {
    if (!store_.has(key(rank))) return false;
    const std::string found = store_.get(key(rank), kLookForRanks);
    const std::string said = without_over(found);
    if (list_in(said) == listed(excluded_)) {
      said_[at(rank)] = said;
      if (said == found) met_[at(rank)] = true;
      return said == found;
    }
    check(said == past_[at(rank)], ErrorKind::kMismatch, site_, "rank ", site_.rank, " excludes ",
          listed(excluded_), ", rank ", rank, " excludes ", list_in(said),
          "; call it again on all ranks that stay, with the same ranks_to_exclude");
    return false;
  }

  std::string name() const {
    std::string attempts = "group";
    for (const std::string& said : said_) attempts += concat('-', said.substr(0, said.find(' ')));
    return attempts;
  }

  TorchStore store_;
  const Site site_;
  const std::vector<int>& excluded_;
  const std::string own_;
  std::vector<std::string> past_;
  std::vector<std::string> said_;
  std::vector<bool> met_;  // the ranks that agreed during this attempt, and may have stopped since
};

/// Runs `talk`, and explains why the store does not answer: the process that served it has ended.
template <typename Talk>
void talk_through_store(const Site& site, Talk&& talk) {
  const auto lost = [&](const c10::DistError& error) {
    TORCH_CHECK_WITH(DistBackendError, false, site,
                     "the ranks that stay cannot meet, as the store of their group does not "
                     "answer: it was served by a process that has ended, which for tcp:// and "
                     "env:// is that of rank 0. End all ranks and start anew; under torchrun, or "
                     "with a FileStore, the store outlives every rank (",
                     error.what_without_backtrace(), ')');
  };
  try {
    talk();
  } catch (const c10::DistNetworkError& error) {
    lost(error);
  } catch (const c10::DistStoreError& error) {
    lost(error);
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> DreamBackend::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) {
  require_open();
  const Site site{"shrink_group", rank_, size_};
  TORCH_CHECK_VALUE(shrink_flags == kShrinkDefault || shrink_flags == kShrinkAbort, site,
                    "expected 'shrink_flags' to be SHRINK_DEFAULT (0) or SHRINK_ABORT (1), got ",
                    shrink_flags);
  if (cpu_) single_host("shrink_group serves the ranks");
  const std::vector<int> excluded = require_excludable(site, ranks_to_exclude);
  const std::vector<int> stay = others(excluded, size_);
  auto options = options_for(stay, opts_override);
  const auto store = c10::make_intrusive<c10d::PrefixStore>("shrink", visit_);
  const auto own = std::find(stay.begin(), stay.end(), rank_);
  Agreement agreement(store, site, excluded, shrinks_.read(), said_at_shrinks_);
  shrinks_.grow(1);
  c10::intrusive_ptr<DreamBackend> made;
  without_gil([&] {
    if (shrink_flags == kShrinkAbort) {
      abort_for("shrink_group() was called with SHRINK_ABORT");
      close_fallback();
    }
    wait_for_calls();
    talk_through_store(site, [&] {
      try {
        const std::string name = agreement.reach(rendezvous_timeout(*options),
                                                 [this](int rank) { return has_ended(rank); });
        made = create(c10::make_intrusive<c10d::PrefixStore>(name, store),
                      static_cast<int>(own - stay.begin()), static_cast<int>(stay.size()), options,
                      callbacks_,
                      [&](int rank) { return why_ended(stay.at(static_cast<std::size_t>(rank))); });
      } catch (const c10::DistNetworkError&) {
        throw;  // nothing can be withdrawn
      } catch (const c10::DistStoreError&) {
        throw;
      } catch (...) {  // a rank is missing, or Ctrl-C
        said_at_shrinks_ = agreement.withdraw();
        throw;
      }
    });
  });
  shrunk_.set(1);
  return made;
}

/// Gloo cannot abort. Its connections close with it, though, and so end the calls of ranks that
/// wait for this one and share no connection with a rank that died. A thread closes it, as it ends
/// its own calls first. This rank agrees with the others meanwhile, and Ctrl-C ends that.
void DreamBackend::close_fallback() {
  if (closing_.joinable()) return;  // an earlier attempt has begun
  closing_ = std::thread([inners = fallback_.close()]() mutable {
    for (Fallback::Inner& inner : inners) {
      inner->shutdown();
      inner.reset();
    }
  });
}

/// Why a rank that had agreed to make a smaller group does not, if it died.
std::string DreamBackend::why_ended(int rank) const {
  if (!has_ended(rank)) return "";
  return concat("the process of rank ", rank, " of the group that shrinks has ended, where it ",
                cpu_->does(rank));
}

c10::intrusive_ptr<DreamOptions> DreamBackend::options_for(
    const std::vector<int>& ranks, const c10::intrusive_ptr<c10d::Backend::Options>& given) const {
  auto options = given ? own_options(given) : c10::make_intrusive<DreamOptions>(*options_);
  if (options->timeout == kBackendDefaultTimeout) options->timeout = timeout();
  options->group_name = options_->group_name;
  options->global_ranks_in_group.clear();
  // The default group has none: its ranks are numbered anew.
  const std::vector<uint64_t>& globals = options_->global_ranks_in_group;
  for (const int rank : ranks) {
    if (globals.empty()) break;
    options->global_ranks_in_group.push_back(globals.at(static_cast<std::size_t>(rank)));
  }
  return options;
}

}  // namespace dreamcomm
