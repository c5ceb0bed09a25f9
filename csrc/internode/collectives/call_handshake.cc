#include "internode/collectives/call_handshake.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "internode/cost/model.h"

namespace dreamcomm {
namespace {

using Text = std::array<char, 1024>;

/// One of the two ranks whose calls differ.
struct Side {
  std::int32_t rank = -1;  // none
  Signature call;
  Text words{};
};
/// A host's report of a mismatch. INVARIANT: two ranks suffice however many there are, so the
/// report is not longer for more ranks. Either the host's first rank differs from the group's
/// first, or the first of its ranks that does is the first that differs from the host's first.
using Sides = std::array<Side, 2>;

/// The first message from one leader to another; the bytes that its host brings follow.
struct Heading {
  Signature signature;
  std::uint32_t agreed = 0;   // whether all ranks of the host made this call
  std::int32_t last = -1;     // which of them entered last; -1: not known
  std::uint32_t brought = 0;  // bytes that follow
};

/// A leader's message to the ranks of its host; the bytes that all take follow.
struct Verdict {
  std::uint32_t agreed = 0;
  LastToCome last{};  // of the other hosts' ranks, if the leader had to wait for one
};
constexpr std::size_t kVerdict = 64;
static_assert(sizeof(Verdict) <= kVerdict);

constexpr std::uint32_t kMismatchSides = 0xfffe;  // a message's number that no algorithm uses

const Reduction kBytes{};  // moved, not computed

template <typename T>
Block block_of(T& value) {
  return {reinterpret_cast<std::byte*>(&value), sizeof value};
}

class CallHandshake {
 public:
  CallHandshake(LinkContext& context, const Signature& own, const Caller& caller,
                const LeaderPayload& payload)
      : context_(context), own_(own), caller_(caller), payload_(payload) {
    most_ = sizeof(Heading) +
            std::max(most_brought(context.hosts()), host_table_bytes(context.topology()));
  }

  void run() {
    compare_here();
    const Cargo mine = context_.allocate(sizeof(Heading) + payload_.brought);
    const auto brought = static_cast<std::uint32_t>(agreed_ ? payload_.brought : 0);
    const Heading heading{own_, agreed_ ? 1U : 0U, context_.latest.here.rank, brought};
    std::memcpy(mine.data(), &heading, sizeof heading);
    if (agreed_ && payload_.bring) payload_.bring(mine.data() + sizeof heading);
    const Cargo told = context_.allocate(kVerdict + payload_.told);
    Verdict verdict{1, {}};
    if (is_leader()) {
      verdict.agreed = compare_hosts(mine, told.data() + kVerdict) ? 1U : 0U;
      verdict.last = last_between_;
      std::memcpy(told.data(), &verdict, sizeof verdict);
    }
    // Ranks that differ may also differ in the sizes of their payloads.
    const Block block{told.data(), kVerdict + (agreed_ ? payload_.told : 0)};
    announce(block);
    std::memcpy(&verdict, told.data(), sizeof verdict);
    context_.latest.between = verdict.last;
    if (verdict.agreed == 0) {
      std::vector<int> named{first_here()};
      for (std::size_t i = 0; i < here_.size() && named.size() < Sides().size(); ++i) {
        if (here_[i] != here_[0]) named.push_back(rank_here(i));
      }
      end_mismatched("", named, deed);
    }
    if (!payload_.take) return;
    const std::optional<Mismatch> objection = payload_.take(told.data() + kVerdict);
    if (!objection) return;
    std::vector<int> named;
    for (const int rank : std::set{objection->one, objection->other}) {
      if (context_.topology().host_of(rank) == context_.host()) named.push_back(rank);
    }
    const std::string where = concat("in ", name(own_.kind), " as call ", own_.sequence, ' ');
    end_mismatched(where + objection->text + ": ", named,
                   [](const Signature&) { return std::string(" called"); });
  }

 private:
  bool is_leader() const { return context_.index() == 0; }
  int leader(int host) const { return context_.topology().rank_at(host, 0); }

  void announce(Block block) {
    const std::span<const Block> one(&block, 1);
    context_.run_on_host(Kind::kBroadcast, kBytes, is_leader() ? one : std::span<const Block>(),
                         one);
  }

  using Gather = std::function<void(std::span<const Block> in, std::span<const Block> out)>;

  template <typename T>
  std::vector<T> gather(T& mine, const Gather& by) {
    std::vector<T> all(static_cast<std::size_t>(context_.ranks_here()));
    std::vector<Block> blocks;
    for (T& one : all) blocks.push_back(block_of(one));
    const Block own = block_of(mine);
    by({&own, 1}, blocks);
    return all;
  }

  /// Finds out whether the ranks of this host make one call; the same answer on each.
  void compare_here() {
    // INVARIANT: a leader sends nothing to other hosts before all ranks of its own host have
    // entered, and no rank returns before it has received from all hosts. So as long as one rank
    // has not entered here, no rank anywhere has returned from this call.
    here_ =
        gather(own_, [this](const auto& in, const auto& out) { context_.gather_on_host(in, out); });
    context_.latest.here = context_.last_here();
    agreed_ = std::all_of(here_.begin(), here_.end(),
                          [this](const Signature& other) { return other == here_[0]; });
  }

  /// Waits until the other hosts' leaders have sent their messages, and taken this one's.
  void wait() {
    context_.wait(context_.receives());
    last_between_ = context_.last_between();
    context_.wait(context_.sends());
  }

  /// True if the hosts make one call. INVARIANT: all leaders give the same answer: if the calls of
  /// two hosts differ, every host finds a call that differs from its own.
  bool compare_hosts(const Cargo& mine, std::byte* told) {
    Cargo sent = mine;
    if (!agreed_) sent.bytes = sizeof(Heading);
    const std::vector<Cargo> theirs = context_.exchange_openings(sent, most_);
    wait();  // what has arrived may be another call's
    bool all = agreed_;
    std::vector<const std::byte*> brought;
    int last_of_host = last_between_.rank;  // the leader, unless it reports another rank
    for (int host = 0; host < context_.hosts(); ++host) {
      const bool own = host == context_.host();
      const Cargo& from = own ? mine : theirs[static_cast<std::size_t>(host)];
      Heading heading;
      std::memcpy(&heading, from.data(), sizeof heading);
      all = all && heading.agreed != 0 && heading.signature == own_;
      brought.push_back(from.data() + sizeof heading);
      const bool is_last = !own && last_between_.rank >= 0 && last_between_.rank == leader(host);
      if (is_last && is_rank_of(heading.last, host)) last_of_host = heading.last;
      if (!own) context_.left_empty(from.bytes - sizeof heading - heading.brought);
    }
    last_between_.rank = last_of_host;
    if (all && payload_.decide) payload_.decide(brought, told);
    return all;
  }

  int rank_here(std::size_t index) const {
    return context_.topology().rank_at(context_.host(), static_cast<int>(index));
  }
  int first_here() const { return rank_here(0); }
  bool is_rank_of(int rank, int host) const {
    return rank >= 0 && rank < context_.size() && context_.topology().host_of(rank) == host;
  }

  /// Describes a rank's call, after its name and before its call site.
  using Describe = std::function<std::string(const Signature& call)>;

  /// Returns the sides of this host's ranks that are `named`, on every one of them.
  Sides sides_here(const std::vector<int>& named, const Describe& describe_call) {
    Text site{};
    put_text(site, caller_.site ? caller_.site() : "");
    const std::vector<Text> sites = gather(site, [this](const auto& in, const auto& out) {
      context_.run_on_host(Kind::kAllGather, kBytes, in, out);
    });
    Sides sides;
    for (std::size_t i = 0; i < named.size(); ++i) {
      const auto index = static_cast<std::size_t>(context_.topology().index_of(named[i]));
      sides[i].rank = named[i];
      sides[i].call = here_[index];
      put_text(sides[i].words,
               concat("rank ", named[i], describe_call(here_[index]), sites[index].data()));
    }
    return sides;
  }

  /// Throws the same error on every rank of all hosts.
  [[noreturn]] void end_mismatched(const std::string& why, const std::vector<int>& named,
                                   const Describe& describe_call) {
    const Sides here = sides_here(named, describe_call);
    std::array<char, 2 * sizeof(Text) + 2> text{};
    if (is_leader()) put_text(text, describe_sides(exchange(here), why.empty()));
    announce(block_of(text));
    const std::string of_group = caller_.group.empty() ? "" : " of " + caller_.group;
    throw Error(ErrorKind::kMismatch,
                concat("the ranks", of_group, " made different calls: ", why, text.data(),
                       ". No data was moved; the group stays usable"));
  }

  /// Returns the sides of all hosts, by rank.
  std::vector<Side> exchange(const Sides& here) {
    const Cargo own = context_.allocate(sizeof here);
    std::memcpy(own.data(), &here, sizeof here);
    std::vector<Cargo> all(static_cast<std::size_t>(context_.hosts()));
    context_.for_other_hosts([&](int host) {
      Cargo& cargo = all[static_cast<std::size_t>(host)];
      cargo = context_.allocate(sizeof here);
      context_.receive(leader(host), cargo, kMismatchSides);
      context_.send(leader(host), own, kMismatchSides);
    });
    wait();
    all[static_cast<std::size_t>(context_.host())] = own;
    std::vector<Side> found;
    for (const Cargo& cargo : all) {
      Sides sides;
      std::memcpy(&sides, cargo.data(), sizeof sides);
      for (Side& side : sides) {
        side.words.back() = '\0';
        if (side.rank >= 0) found.push_back(side);
      }
    }
    std::sort(found.begin(), found.end(),
              [](const Side& a, const Side& b) { return a.rank < b.rank; });
    return found;
  }

  /// Describes the first side and, if `calls` differ, the first whose call differs.
  static std::string describe_sides(const std::vector<Side>& sides, bool calls) {
    const auto other = std::find_if(sides.begin() + 1, sides.end(), [&](const Side& side) {
      return !calls || side.call != sides[0].call;
    });
    return concat(sides[0].words.data(), other == sides.end() ? "" : ", ",
                  other == sides.end() ? "" : other->words.data());
  }

  LinkContext& context_;
  Signature own_;
  const Caller& caller_;
  const LeaderPayload& payload_;
  std::size_t most_;             // bytes that any host may send
  std::vector<Signature> here_;  // of the ranks of this host
  LastToCome last_between_;      // of the leaders whose messages this one waited for
  bool agreed_ = false;          // whether they are one
};

}  // namespace

void handshake(LinkContext& context, const Signature& own, const Caller& caller,
               const LeaderPayload& payload) {
  CallHandshake(context, own, caller, payload).run();
}

}  // namespace dreamcomm
