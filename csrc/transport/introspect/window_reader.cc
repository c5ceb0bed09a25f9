#include "transport/introspect/window_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <iomanip>
#include <memory>
#include <sstream>

#include "transport/os/unix_socket.h"

namespace dreamcomm {
namespace {

template <std::size_t N>
std::string text_of(const std::array<char, N>& chars) {
  return {chars.begin(), std::find(chars.begin(), chars.end(), '\0')};
}

std::string digits_of(const std::array<std::uint8_t, 16>& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : bytes) {
    text += kDigits[byte >> 4U];
    text += kDigits[byte & 15U];
  }
  return text;
}

/// nccl-tests' size of a call.
std::int64_t whole_bytes(Kind kind, std::int64_t block, int size) {
  const bool in_blocks = kind == Kind::kAllGather || kind == Kind::kGather ||
                         kind == Kind::kScatter || kind == Kind::kReduceScatter;
  return in_blocks ? block * size : block;
}

Kind kind_of(const Gauge& gauge) {
  return static_cast<Kind>(std::clamp<std::int64_t>(gauge.read(), 0, kKinds - 1));
}

std::optional<Kind> before_of(const Progress& progress) {
  if (progress.sequence.read() < 2) return std::nullopt;
  return kind_of(progress.before);
}

RankView::Message oldest_of(const Correspondence& messages) {
  return {
      messages.kind.read() == static_cast<std::int64_t>(Kind::kSend) ? Kind::kSend : Kind::kRecv,
      static_cast<int>(messages.peer.read()), messages.bytes.read(), messages.since_ns.read()};
}

}  // namespace

RankView view_of(const Header& header) {
  RankView view;
  view.version = header.identity.version;
  if (view.version != kProtocolVersion) return view;
  view.pid = header.identity.pid;
  if (header.named.read() == 0) return view;
  view.rank = header.identity.rank;
  view.size = header.identity.size;
  view.team = digits_of(header.identity.team);
  view.group = text_of(header.identity.group);
  view.status = static_cast<Status>(header.status.read());
  if (view.status == Status::kFailed) view.reason = text_of(header.reason);
  const Progress& progress = header.progress;
  view.sequence = progress.sequence.read();
  view.kind = kind_of(progress.kind);
  view.before = before_of(progress);
  view.bytes = whole_bytes(view.kind, progress.bytes.read(), view.size);
  view.entered_ns = progress.entered_ns.read();
  view.inside = progress.inside.read() != 0;
  view.away = progress.away.read() != 0;
  view.answers_barrier = header.present.read() % 2 == 1;
  view.barrier_began_ns = header.barrier_began_ns.read();
  view.waiting_for = static_cast<int>(progress.waiting_for.read());
  for (std::size_t k = 0; k < view.counts.size(); ++k) {
    const Tally& tally = header.tallies[k];
    view.counts[k] = {tally.calls.read(), tally.sent.read(), tally.received.read()};
  }
  const Correspondence& messages = header.correspondence;
  view.messages = messages.pending.read();
  view.oldest = oldest_of(messages);
  return view;
}

RankView whole_view_of(const Header& header) {
  RankView view = view_of(header);
  if (view.size == 0) return view;
  const auto here = static_cast<std::size_t>(std::max(header.identity.here, 0));
  if (here == 0) return view;
  const MultiNodeState& whole = header.whole;
  const auto number = [&](int index) {
    const auto at = static_cast<std::size_t>(index);
    return index < 0 || at >= std::min(here, whole.numbers.size()) ? -1 : whole.numbers[at];
  };
  // A rank in a call waits in a part within the host, or for another host.
  const int near = number(view.inside || view.answers_barrier ? view.waiting_for : -1);
  const Progress& calls = whole.calls;
  view.sequence = calls.sequence.read();
  view.kind = kind_of(calls.kind);
  view.before = before_of(calls);
  view.bytes = whole_bytes(view.kind, calls.bytes.read(), view.size);
  view.entered_ns = calls.entered_ns.read();
  view.inside = calls.inside.read() != 0;
  view.away = view.away && view.inside;
  view.waiting_for = near >= 0 ? near : static_cast<int>(calls.waiting_for.read());
  for (std::size_t k = 0; k < view.counts.size(); ++k) {
    const Tally& tally = whole.tallies[k];
    const auto kind = static_cast<Kind>(k);
    RankView::Counts& counts = view.counts[k];
    const bool is_message = kind == Kind::kSend || kind == Kind::kRecv;
    counts.calls = tally.calls.read() + (is_message ? counts.calls : 0);
    counts.sent += tally.sent.read();
    counts.received += tally.received.read();
  }
  view.oldest.peer = number(view.oldest.peer);
  const std::int64_t far = whole.messages.pending.read();
  const RankView::Message oldest = oldest_of(whole.messages);
  if (far > 0 && (view.messages == 0 || oldest.since_ns < view.oldest.since_ns)) {
    view.oldest = oldest;
  }
  view.messages += far;
  return view;
}

std::string last_act(const RankView& rank) {
  const bool in_barrier = rank.answers_barrier && !rank.inside;
  if (rank.sequence == 0) {
    return in_barrier ? "is in monitored_barrier" : "has called no collective of this group yet";
  }
  const std::chrono::nanoseconds now = std::chrono::steady_clock::now().time_since_epoch();
  const double ago = static_cast<double>(now.count() - rank.entered_ns) * 1e-9;
  std::ostringstream text;
  const char* const does = rank.away     ? "waits for ranks of other hosts in "
                           : rank.inside ? "is in "
                           : in_barrier  ? "is in monitored_barrier, after "
                                         : "last called ";
  text << does << name(rank.kind) << " as call " << rank.sequence << ", entered " << std::fixed
       << std::setprecision(1) << ago << " s ago";
  return text.str();
}

std::optional<RankView> observe(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat found{};
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (fd.get() < 0 || fstat(fd.get(), &found) != 0 || found.st_uid != geteuid() ||
      !S_ISREG(found.st_mode) || static_cast<std::size_t>(found.st_size) < sizeof(Header) ||
      seals < 0 || (seals & F_SEAL_SHRINK) == 0) {  // memory that might shrink is no window
    return std::nullopt;
  }
  void* mapped = mmap(nullptr, sizeof(Header), PROT_READ, MAP_SHARED, fd.get(), 0);
  if (mapped == MAP_FAILED) return std::nullopt;
  const auto unmap = [](const Header* header) {
    munmap(const_cast<Header*>(header), sizeof(Header));
  };
  const std::unique_ptr<const Header, decltype(unmap)> header(static_cast<const Header*>(mapped),
                                                              unmap);
  RankView view = whole_view_of(*header);
  if (view.version == kProtocolVersion && view.size == 0) return std::nullopt;  // not named yet
  return view;
}

}  // namespace dreamcomm
