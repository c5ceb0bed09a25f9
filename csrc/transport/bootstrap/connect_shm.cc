// How ranks find out whether they share memory: they try.
//
//   1. Every rank creates its window, listens at an abstract Unix address and
//      publishes both in its rank info. A rank that shares no memory publishes the
//      reason instead, and then no rank shares.
//   2. Each pair connects once, the higher rank to the lower. A connection that
//      fails means another host (or network namespace). The higher rank sends a
//      handshake and its window's descriptor without waiting for an answer, unless
//      the listener belongs to another user.
//   3. Every rank publishes which ranks it reached, so that all know which to accept.
//   4. The lower rank checks the user, the handshake and the window, and answers with
//      its own. No rank waits for an answer before it has accepted, so no cycle. Any
//      other connection is refused and reported (transport/bootstrap/acceptor.h).
//   5. Both map the other's window and compare the nonce in it with the rank info's.
//      Heaps travel in a second message, if the rank info says that there is one.
//   6. Every rank publishes the outcome; memory is shared only if all succeeded.
//   7. Otherwise every rank publishes whose memory it has mapped; the hosts follow from that.
//
// The connections stay open: the kernel closes them when a process ends.
//
// tests/models/meeting.pml checks these steps in every order, with ranks that die at any.
#include "transport/bootstrap/connect_shm.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "core/error.h"
#include "transport/bootstrap/acceptor.h"
#include "transport/bootstrap/rank_info.h"
#include "transport/bootstrap/setup_board.h"
#include "transport/os/memfd.h"
#include "transport/os/unix_socket.h"
#include "transport/shm/shm_fabric.h"

namespace dreamcomm {
namespace {

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "unknown";
  return name.data();
}

/// How a rank has reached each lower rank, by its place in the list that it publishes.
enum Reached : char { kUnreached = '0', kRank = '1', kOtherUser = 'u' };

class ShmBootstrap {
 public:
  ShmBootstrap(Store& store, int rank, int size, const ShmOptions& options)
      : rank_(rank),
        size_(size),
        options_(options),
        board_(
            store, rank, size, options.timeout, [this](int r) { return lost(r); }, options.group,
            options.numbers),
        layout_(size, options.page_bytes, options.message_bytes) {
    if (!options.no_heap.empty()) no_heap_ = concat("rank ", number(rank), ": ", options.no_heap);
  }

  ShmResult run() {
    try {
      create_window();
      read_rank_infos();
      std::string problem = refusal();
      if (problem.empty()) problem = connect_peers();
      return conclude(problem);
    } catch (const Error& error) {
      abort(error);
      throw;
    } catch (...) {  // Ctrl-C, or an exception of the store
      abort(Error(ErrorKind::kInterrupted, "it was interrupted, or its store failed"));
      throw;
    }
  }

 private:
  int number(int r) const { return options_.numbers.of(r); }
  RankInfo& info(int r) { return infos_[static_cast<std::size_t>(r)]; }
  ShmPeer& peer(int r) { return peers_[static_cast<std::size_t>(r)]; }

  void abort(const Error& error) {
    own_fd_ = Fd();  // the store may need a descriptor, and a lack of them may be the error
    acceptor_.reset();
    peers_.clear();
    board_.abort(error);
  }

  /// Describes a rank that is lost, among those that have connected, for which `awaited` may be
  /// waiting; or why `awaited` will not arrive; or "". A rank closes its connections before it
  /// reports its error, so a rank that has hung up counts from the second check on.
  std::string lost(int awaited) {
    const std::string why = options_.will_not_come ? options_.will_not_come(awaited) : "";
    if (!why.empty()) return why;
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
      if (has_ended(peer(r).process)) return describe_end(r);
      if (hung_up_.contains(r))
        return concat("rank ", number(r), " has hung up without a word, as those do that end");
      if (peer(r).socket && hung_up(peer(r).socket)) hung_up_.insert(r);
    }
    return "";
  }
  std::string describe_end(int r) const {
    return concat("the process of rank ", number(r), " has ended");
  }

  void create_window() {
    if (options_.make_call_sites) call_sites_ = options_.make_call_sites();
    RankInfo mine;
    mine.refusal = lay_out();
    mine.version = kProtocolVersion;
    mine.rank = rank_;
    mine.size = size_;
    mine.page_bytes = layout_.page_bytes();
    mine.message_bytes = layout_.message_bytes();
    mine.nonce = make_nonce();
    mine.host = host_name();
    mine.settings = options_.settings;
    if (options_.heap) {
      mine.heap_bytes = options_.heap->bytes();
      mine.heap = options_.heap->id();
    }
    if (mine.refusal.empty()) layout_.header(own_.data()).nonce = mine.nonce;
    std::ostringstream address;
    address << "dreamcomm-" << getpid() << '-' << std::hex;
    for (const unsigned byte : mine.nonce) address << byte;
    mine.socket = address.str();
    if (mine.refusal.empty()) acceptor_.emplace(mine.socket, mine.nonce);
    board_.publish("card", to_text(mine));
  }

  /// Creates the own window. Returns why there is none, or "".
  std::string lay_out() {
    if (options_.refuse) return "has shared_memory switched off";
    try {
      own_fd_ = create_memfd(kWindowLabel, layout_.bytes());
      own_ = Mapping(own_fd_, layout_.bytes());
    } catch (const NoSharedMemory& error) {
      return concat("has no memory to share: ", error.what());
    }
    layout_.construct(own_.data(), rank_, 0);
    return "";
  }

  void read_rank_infos() {
    for (int r = 0; r < size_; ++r) {
      infos_.push_back(rank_info_from(board_.get("card", r), r));
      const RankInfo& theirs = infos_.back();
      const std::string differences = differences_to(theirs);
      check(differences.empty(), ErrorKind::kMismatch, "rank ", number(rank_), " and rank ",
            number(r), " set up the same group differently: ", differences);
    }
    peers_.resize(static_cast<std::size_t>(size_));
    mapped_.assign(static_cast<std::size_t>(size_), '0');
    mapped_[static_cast<std::size_t>(rank_)] = '1';
  }

  /// Describes what another rank has set up differently, both ways, and what to do; or "".
  std::string differences_to(const RankInfo& theirs) const {
    std::string words;
    const auto compare = [&](const char* what, const auto& mine, const auto& other) {
      if (mine == other) return;
      words += concat(words.empty() ? "" : ", ", what, ' ', mine, " and ", other);
    };
    compare("world size", size_, theirs.size);
    compare("page_bytes", layout_.page_bytes(), theirs.page_bytes);
    compare("message_bytes", layout_.message_bytes(), theirs.message_bytes);
    std::string advice = "; give every rank the same ranks and options";
    for (std::size_t i = 0; i < std::max(options_.settings.size(), theirs.settings.size()); ++i) {
      const std::string mine = i < options_.settings.size() ? options_.settings[i] : "nothing";
      const std::string other = i < theirs.settings.size() ? theirs.settings[i] : "nothing";
      if (mine == other) continue;
      words += concat(words.empty() ? "" : ", ", mine, " and ", other);
      const auto remedy = options_.remedies.find(mine.substr(0, mine.find('=')));
      if (remedy != options_.remedies.end()) advice += concat(". ", remedy->second);
    }
    return words.empty() ? "" : words + advice;
  }

  /// Describes the first rank that shares no memory, or "".
  std::string refusal() {
    for (int r = 0; r < size_; ++r) {
      if (!info(r).refusal.empty()) return concat("rank ", number(r), ' ', info(r).refusal);
    }
    return "";
  }

  /// Runs steps 2 to 5. Returns the first error, or "".
  std::string connect_peers() {
    std::string problem;
    std::string reached;
    for (int r = 0; r < rank_; ++r) {
      reached.push_back(dial(r));
      if (problem.empty()) problem = obstacle(rank_, r, reached.back());
    }
    board_.publish("dial", reached + '.');
    int expected = 0;
    for (int r = rank_ + 1; r < size_; ++r) {
      const char it_reached = listed("dial", r, r + 1)[static_cast<std::size_t>(rank_)];
      if (it_reached == kRank) ++expected;
      if (problem.empty()) problem = obstacle(r, rank_, it_reached);
    }
    for (; expected > 0; --expected) {
      const std::string refused = accept_peer();
      if (problem.empty()) problem = refused;
    }
    for (int r = 0; r < rank_; ++r) {
      if (!peer(r).socket) continue;
      const std::string refused = take_answer(r);
      if (problem.empty()) problem = refused;
    }
    return problem;
  }

  /// The name of the host that a rank belongs to.
  const std::string& host_of(int r) {
    return options_.hosts.empty() ? info(r).host : options_.hosts[static_cast<std::size_t>(r)];
  }

  std::string listed(const char* what, int r, int entries) {
    std::string list = board_.get(what, r);
    check(list.size() == static_cast<std::size_t>(entries), ErrorKind::kMismatch, "what rank ",
          number(r), " published cannot be read: ", list);
    return list;
  }

  /// Why the ranks do not share memory, or "".
  std::string obstacle(int from, int to, char reached) {
    if (reached == kRank) return "";
    if (reached == kOtherUser) {
      return concat("rank ", number(to), " and rank ", number(from), " run as different users");
    }
    if (!options_.hosts.empty() && host_of(from) != host_of(to)) {
      return concat("the option hosts puts rank ", number(from), " on ", host_of(from),
                    " and rank ", number(to), " on ", host_of(to));
    }
    return concat("rank ", number(from), " (host ", info(from).host, ") and rank ", number(to),
                  " (host ", info(to).host, ") are not in one host or network namespace");
  }

  Handshake handshake_to(int r) {
    Handshake handshake;
    handshake.from = static_cast<std::uint32_t>(rank_);
    handshake.sender = info(rank_).nonce;
    handshake.receiver = info(r).nonce;
    return handshake;
  }

  Reached dial(int r) {
    if (!options_.hosts.empty() && host_of(r) != host_of(rank_)) return kUnreached;
    std::optional<Fd> socket = connect_to(info(r).socket);
    if (!socket) return kUnreached;
    const PeerProcess process = peer_process(*socket);
    if (!is_own_user(process)) return kOtherUser;
    const Handshake handshake = handshake_to(r);
    if (!hand_over(*socket, handshake)) return kUnreached;
    peer(r).process = watch_process(process.pid);
    peer(r).socket = std::move(*socket);
    return kRank;
  }

  /// Sends the handshake with the window, and the heap if there is one, to a process of this user.
  bool hand_over(const Fd& socket, const Handshake& handshake) {
    return send_with_fd(socket, &handshake, sizeof handshake, own_fd_) &&
           (!options_.heap ||
            send_with_fd(socket, &handshake, sizeof handshake, options_.heap->fd()));
  }

  /// Accepts one of the expected higher ranks and answers. Returns why it cannot share, or "".
  std::string accept_peer() {
    while (true) {
      std::optional<Acceptor::AcceptedPeer> accepted;
      const bool arrived = board_.await([&](SetupBoard::Deadline until) {
        accepted = acceptor_->next(until);
        return accepted.has_value();
      });
      check(arrived, ErrorKind::kTimeout, board_.where(), "no connection within the timeout of ",
            options_.timeout.count(), " ms from one of the ranks", unconnected());
      const int from = static_cast<int>(accepted->handshake.from);
      if (!is_from_peer(accepted->handshake, from) || peer(from).socket) {
        acceptor_->refuse(accepted->socket, "it is none of the expected ranks");
        continue;
      }
      std::optional<Mapping> window = window_of(from, accepted->memory);
      if (!window) {
        acceptor_->refuse(accepted->socket,
                          concat("it connected as rank ", number(from), " with other memory"));
        continue;
      }
      peer(from).process = watch_process(peer_process(accepted->socket).pid);
      const Handshake answer = handshake_to(from);
      if (!hand_over(accepted->socket, answer)) {
        peer(from).socket = std::move(accepted->socket);
        return concat("rank ", number(from), " closed its connection");
      }
      return adopt(from, std::move(accepted->socket), std::move(*window));
    }
  }

  std::string unconnected() {
    std::string ranks;
    for (int r = rank_ + 1; r < size_; ++r) {
      if (!peer(r).socket) ranks += concat(' ', number(r));
    }
    return ranks;
  }

  bool is_from_peer(const Handshake& handshake, int from) {
    return handshake.magic == Handshake{}.magic && handshake.version == kProtocolVersion &&
           from >= 0 && from < size_ && from != rank_ && handshake.sender == info(from).nonce &&
           handshake.receiver == info(rank_).nonce;
  }

  std::string take_answer(int r) {
    Handshake handshake;
    Fd memory;
    if (!receive(peer(r).socket, handshake, memory) || !is_from_peer(handshake, r)) {
      return concat("rank ", number(r), " did not answer the connection of rank ", number(rank_));
    }
    std::optional<Mapping> window = window_of(r, memory);
    if (!window) return concat("rank ", number(r), " handed over other memory than its own");
    return adopt(r, std::move(peer(r).socket), std::move(*window));
  }

  /// Receives a handshake with its memory; returns false if none arrives.
  bool receive(const Fd& socket, Handshake& handshake, Fd& memory) {
    return board_.await([&](SetupBoard::Deadline until) { return readable(socket, until); }) &&
           receive_with_fd(socket, &handshake, sizeof handshake, memory, board_.deadline());
  }

  /// The memory as the window of a rank, or nothing if it is not that.
  std::optional<Mapping> window_of(int r, const Fd& memory) {
    if (!is_sealed_memfd(memory, layout_.bytes())) return std::nullopt;
    Mapping window(memory, layout_.bytes());
    if (layout_.header(window.data()).nonce != info(r).nonce) return std::nullopt;
    return window;
  }

  /// Adds the peer with its heap, if it has one. Returns why that cannot be done, or "".
  std::string adopt(int r, Fd socket, Mapping window) {
    std::shared_ptr<const Mapping> heap;
    if (info(r).heap_bytes > 0) {
      const std::optional<Fd> theirs = receive_heap(r, socket);
      if (!theirs) return concat("rank ", number(r), " did not hand over its heap");
      if (options_.heap) heap = map_heap(r, *theirs);
    }
    mapped_[static_cast<std::size_t>(r)] = '1';
    peer(r) =
        ShmPeer{std::move(socket), std::move(peer(r).process), std::move(window), std::move(heap)};
    return "";
  }

  /// Receives the heap that a rank announced in its rank info, or nothing.
  std::optional<Fd> receive_heap(int r, const Fd& socket) {
    Handshake handshake;
    Fd memory;
    if (!receive(socket, handshake, memory) || !is_from_peer(handshake, r) ||
        !is_sealed_memfd(memory, info(r).heap_bytes)) {
      return std::nullopt;
    }
    return memory;
  }

  /// Returns null if there is no address space for it: then all ranks run without heaps.
  std::shared_ptr<const Mapping> map_heap(int r, const Fd& memory) {
    try {
      return options_.heap->map_peer(info(r).heap, memory, info(r).heap_bytes);
    } catch (const Error& error) {
      no_heap_ =
          concat("rank ", number(rank_), " has no room for that of rank ", number(r), " (",
                 error.what(), "); give a smaller heap_bytes, or raise the limit: ulimit -v");
      return nullptr;
    }
  }

  /// Step 6.
  ShmResult conclude(const std::string& problem) {
    const std::string refused = acceptor_ ? acceptor_->refused() : "";
    if (!refused.empty() && options_.warn) {
      options_.warn(concat("rank ", number(rank_), " of ", options_.numbers.size(size_),
                           " refused connections of strangers to ", "its address: ", refused));
    }
    const std::string shared = "shared";
    board_.publish("outcome", problem.empty() ? shared + no_heap_ : problem);
    std::string unshared;
    std::string no_heap;
    std::vector<std::string> apart;
    for (int r = 0; r < size_; ++r) {  // all: a rank may look unreachable because it has died
      const std::string outcome = board_.get("outcome", r);
      apart.push_back(outcome.starts_with(shared) ? "" : outcome);
      if (outcome.starts_with(shared)) {
        if (no_heap.empty()) no_heap = outcome.substr(shared.size());
      } else if (unshared.empty()) {
        unshared = outcome;
      }
    }
    if (!unshared.empty()) {
      return {nullptr, unshared, "", topology(), info(0).nonce, apart, take_processes()};
    }
    if (!no_heap.empty()) {
      options_.heap.reset();
      for (ShmPeer& one : peers_) one.heap.reset();
    }
    const std::string words = concat("shm: ", size_, size_ == 1 ? " rank" : " ranks", " of host ",
                                     info(rank_).host, " map each other's memory");
    layout_.header(own_.data()).identity.team = info(0).nonce;
    return {std::make_unique<ShmFabric>(rank_, layout_, std::move(own_fd_), std::move(own_),
                                        options_.heap, std::move(peers_), words,
                                        std::move(call_sites_)),
            words,
            no_heap,
            Topology(),
            info(0).nonce,
            {},
            {}};
  }

  /// Runs step 7, if not all ranks share: which ranks share with which.
  Topology topology() {
    if (!refusal().empty()) return Topology();
    if (options_.on_hosts) options_.on_hosts();
    board_.publish("maps", mapped_);
    std::vector<std::string> maps;
    std::vector<std::string> names;
    for (int r = 0; r < size_; ++r) {
      maps.push_back(listed("maps", r, size_));
      names.push_back(host_of(r));
    }
    return Topology(maps, names);
  }

  std::vector<Fd> take_processes() {
    std::vector<Fd> processes;
    for (ShmPeer& one : peers_) processes.push_back(std::move(one.process));
    return processes;
  }

  int rank_;
  int size_;
  ShmOptions options_;
  SetupBoard board_;
  WindowLayout layout_;
  Fd own_fd_;
  Mapping own_;
  std::shared_ptr<CallSiteService> call_sites_;
  std::optional<Acceptor> acceptor_;
  std::string no_heap_;  // why this rank cannot share heaps
  std::vector<RankInfo> infos_;
  std::vector<ShmPeer> peers_;
  std::string mapped_;     // '1' for each rank whose memory this one maps
  std::set<int> hung_up_;  // ranks seen to hang up; they may still report why
};

}  // namespace

ShmResult connect_shm(Store& store, int rank, int size, const ShmOptions& options) {
  check(size > 0 && rank >= 0 && rank < size, ErrorKind::kInvalid, "rank ", rank,
        " is not in a world of ", size);
  return ShmBootstrap(store, rank, size, options).run();
}

}  // namespace dreamcomm
