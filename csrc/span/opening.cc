#include "span/opening.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "span/model.h"

namespace dreamcomm {
namespace {

using Text = std::array<char, 1024>;

/// The first message of one leader to another; what its host brings follows.
struct Envelope {
  Signature signature;
  std::uint32_t agreed = 0;  // whether all ranks of the host made this call
};

/// What a leader tells the ranks of its host; what all take follows.
struct Verdict {
  std::uint32_t agreed = 0;
};
constexpr std::size_t kVerdict = 64;
static_assert(sizeof(Verdict) <= kVerdict);

constexpr std::uint32_t kEnvelopes = 0xffff;  // numbers of messages that no algorithm uses
constexpr std::uint32_t kWords = 0xfffe;

const Reduction kBytes{};  // moved, not computed

template <typename T>
Block block_of(T& value) {
  return {reinterpret_cast<std::byte*>(&value), sizeof value};
}

class Beginning {
 public:
  Beginning(Trip& trip, const Signature& own, const std::function<std::string()>& site,
            const Small& small)
      : trip_(trip), own_(own), site_(site), small_(small) {
    most_ =
        sizeof(Envelope) + std::max(most_brought(trip.hosts()), host_table_bytes(trip.topology()));
  }

  void hold() {
    compare_here();
    const Cargo mine = trip_.room(sizeof(Envelope) + small_.brought);
    const Envelope envelope{own_, agreed_ ? 1U : 0U};
    std::memcpy(mine.data(), &envelope, sizeof envelope);
    if (agreed_ && small_.bring) small_.bring(mine.data() + sizeof envelope);
    const Cargo told = trip_.room(kVerdict + small_.told);
    Verdict verdict{1};
    if (is_leader()) {
      verdict.agreed = meet(mine, told.data() + kVerdict) ? 1U : 0U;
      std::memcpy(told.data(), &verdict, sizeof verdict);
    }
    // Ranks that differ may differ in their small parts' sizes, too.
    const Block block{told.data(), kVerdict + (agreed_ ? small_.told : 0)};
    announce(block);
    std::memcpy(&verdict, told.data(), sizeof verdict);
    if (verdict.agreed == 0) {
      end_mismatched("", [this](int rank, const Signature& call) {
        return is_worth_a_word(rank) ? concat("rank ", rank, " called ", words(call)) : "";
      });
    }
    if (!small_.take) return;
    const std::optional<Objection> objection = small_.take(told.data() + kVerdict);
    if (!objection) return;
    end_mismatched(objection->text + ": ", [&](int rank, const Signature&) {
      return rank == objection->one || rank == objection->other ? concat("rank ", rank, " called")
                                                                : "";
    });
  }

 private:
  bool is_leader() const { return trip_.index() == 0; }
  int leader(int host) const { return trip_.topology().rank_at(host, 0); }

  void announce(Block block) {
    const std::span<const Block> one(&block, 1);
    trip_.here(Kind::kBroadcast, kBytes, is_leader() ? one : std::span<const Block>(), one);
  }

  template <typename T>
  std::vector<T> gather(T& mine) {
    std::vector<T> all(static_cast<std::size_t>(trip_.ranks_here()));
    std::vector<Block> blocks;
    for (T& one : all) blocks.push_back(block_of(one));
    const Block own = block_of(mine);
    trip_.here(Kind::kAllGather, kBytes, {&own, 1}, blocks);
    return all;
  }

  /// Whether the ranks of this host make one call; the same answer on each.
  void compare_here() {
    here_ = gather(own_);
    agreed_ = std::all_of(here_.begin(), here_.end(),
                          [this](const Signature& other) { return other == here_[0]; });
  }

  /// What the other hosts' leaders send this one, in up to `most` bytes, which sends them `mine`.
  std::vector<Cargo> swap(const Cargo& mine, std::size_t most, std::uint32_t number) {
    std::vector<Cargo> theirs(static_cast<std::size_t>(trip_.hosts()));
    trip_.for_other_hosts([&](int host) {
      Cargo& cargo = theirs[static_cast<std::size_t>(host)];
      cargo = trip_.room(most);
      trip_.receive(leader(host), cargo, number);
      trip_.send(leader(host), mine, number);
    });
    trip_.wait(trip_.receives());
    trip_.wait(trip_.sends());
    return theirs;
  }

  /// Whether the hosts make one call. INVARIANT: all leaders give the same answer: if the calls of
  /// two hosts differ, every host finds one that differs from its own.
  bool meet(const Cargo& mine, std::byte* told) {
    Cargo sent = mine;
    if (!agreed_) sent.bytes = sizeof(Envelope);
    const std::vector<Cargo> theirs = swap(sent, most_, kEnvelopes);  // may be another call's
    bool all = agreed_;
    std::vector<const std::byte*> brought;
    for (int host = 0; host < trip_.hosts(); ++host) {
      const bool own = host == trip_.host();
      const Cargo& from = own ? mine : theirs[static_cast<std::size_t>(host)];
      Envelope envelope;
      std::memcpy(&envelope, from.data(), sizeof envelope);
      all = all && envelope.agreed != 0 && envelope.signature == own_;
      brought.push_back(from.data() + sizeof envelope);
    }
    if (all && small_.judge) small_.judge(brought, told);
    return all;
  }

  /// What is to be said of a rank of this host, before the place of its call; "": nothing.
  using Say = std::function<std::string(int rank, const Signature& call)>;

  std::string words_here(const Say& say) {
    Text site{};
    put_text(site, site_ ? site_() : "");
    const std::vector<Text> sites = gather(site);
    std::string text;
    for (std::size_t i = 0; i < here_.size(); ++i) {
      const std::string said =
          say(trip_.topology().rank_at(trip_.host(), static_cast<int>(i)), here_[i]);
      if (said.empty()) continue;
      text += concat(text.empty() ? "" : ", ", said, sites[i].data());
    }
    return text;
  }

  /// Of a host whose ranks make one call the first is told of, else all.
  bool is_worth_a_word(int rank) const { return !agreed_ || trip_.topology().index_of(rank) == 0; }

  /// On every rank of all hosts.
  [[noreturn]] void end_mismatched(const std::string& why, const Say& say) {
    std::string all = words_here(say);
    if (is_leader()) all = exchange(all);
    std::array<char, 4096> text{};
    if (is_leader()) put_text(text, all);
    announce(block_of(text));
    throw Error(ErrorKind::kMismatch, concat("the ranks made different calls: ", why, text.data(),
                                             ". No data was moved; the group stays usable"));
  }

  std::string exchange(const std::string& mine) {
    const Cargo own = trip_.room(sizeof(Text));
    put_text({reinterpret_cast<char*>(own.data()), own.bytes}, mine);
    std::vector<Cargo> theirs = swap(own, sizeof(Text), kWords);
    theirs[static_cast<std::size_t>(trip_.host())] = own;
    std::string text;
    for (const Cargo& cargo : theirs) {
      cargo.data()[cargo.bytes - 1] = std::byte{0};
      const std::string of_host = reinterpret_cast<const char*>(cargo.data());
      text += concat(text.empty() || of_host.empty() ? "" : ", ", of_host);
    }
    return text;
  }

  Trip& trip_;
  Signature own_;
  const std::function<std::string()>& site_;
  const Small& small_;
  std::size_t most_;             // bytes that any host may send
  std::vector<Signature> here_;  // of the ranks of this host
  bool agreed_ = false;          // whether they are one
};

}  // namespace

void open(Trip& trip, const Signature& own, const std::function<std::string()>& site,
          const Small& small) {
  Beginning(trip, own, site, small).hold();
}

}  // namespace dreamcomm
