// The ranks that stay make a smaller group, also after the others were lost.
#include <algorithm>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/backend.h"
#include "c10d/convert.h"
#include "c10d/python.h"
#include "c10d/store.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

/// As torch.distributed has them.
constexpr int kShrinkDefault = 0;
constexpr int kShrinkAbort = 1;

/// How often a rank looks for what the others have said.
constexpr milliseconds kLook{10};

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

/// Those that stay tell each other whom they exclude: ranks that differ in that would
/// wait for each other in vain, or make two groups of one.
class Agreement {
 public:
  Agreement(const StorePtr& store, const Site& site, const std::vector<int>& excluded)
      : store_(store), site_(site), excluded_(excluded) {}

  /// Throws Error unless all that stay exclude the same ranks.
  void reach(milliseconds timeout) {
    const Clock::time_point deadline = deadline_in(Clock::now(), timeout);
    store_.set(key(site_.rank), listed(excluded_));
    std::vector<int> silent = others(excluded_, site_.size);
    while (true) {
      std::erase_if(silent, [this](int rank) { return has_agreed(rank); });
      // Of these none should say anything; one that does has excluded others.
      for (const int rank : excluded_) has_agreed(rank);
      if (silent.empty()) return;
      check(Clock::now() < deadline, ErrorKind::kTimeout, site_, "of the ranks that stay, ",
            listed(silent), " did not call it within the timeout of ", timeout.count(),
            " ms. All ranks but the excluded ", listed(excluded_),
            " must call it; exclude those that have ended, too");
      std::this_thread::sleep_for(kLook);
      check_signals();
    }
  }

 private:
  static std::string key(int rank) { return concat("excludes/", rank); }

  bool has_agreed(int rank) {
    if (!store_.has(key(rank))) return false;
    const std::string theirs = store_.get(key(rank), kLook);
    check(theirs == listed(excluded_), ErrorKind::kMismatch, site_, "rank ", site_.rank,
          " excludes ", listed(excluded_), ", rank ", rank, " excludes ", theirs,
          "; call it again on all ranks that stay, with the same ranks_to_exclude");
    return true;
  }

  TorchStore store_;
  const Site site_;
  const std::vector<int>& excluded_;
};

/// A store that cannot be reached any more has gone with the process that served it.
void agree(const StorePtr& store, const Site& site, const std::vector<int>& excluded,
           milliseconds timeout) {
  const auto lost = [&](const c10::DistError& error) {
    TORCH_CHECK_WITH(DistBackendError, false, site,
                     "the ranks that stay cannot meet, as the store of their group does not "
                     "answer: it was served by a process that has ended, which for tcp:// and "
                     "env:// is that of rank 0. End all ranks and start anew; under torchrun, or "
                     "with a FileStore, the store outlives every rank (",
                     error.what_without_backtrace(), ')');
  };
  try {
    Agreement(store, site, excluded).reach(timeout);
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
  const std::vector<int> excluded = require_excludable(site, ranks_to_exclude);
  const std::vector<int> stay = others(excluded, size_);
  auto options = options_for(stay, opts_override);
  // All that stay have tried equally often: what an earlier attempt has left is not read.
  const auto store =
      c10::make_intrusive<c10d::PrefixStore>(concat("shrink/", shrinks_.read()), visit_);
  shrinks_.grow(1);
  const auto own = std::find(stay.begin(), stay.end(), rank_);
  c10::intrusive_ptr<DreamBackend> made;
  without_gil([&] {
    if (shrink_flags == kShrinkAbort) abort_for("shrink_group() was called with SHRINK_ABORT");
    wait_for_calls();
    agree(store, site, excluded, meeting_time(*options));
    made = create(store, static_cast<int>(own - stay.begin()), static_cast<int>(stay.size()),
                  options, host_);
  });
  shrunk_.set(1);
  return made;
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
