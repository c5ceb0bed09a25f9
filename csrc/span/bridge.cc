#include "span/bridge.h"

#include <utility>

#include "comm/validate.h"
#include "core/error.h"
#include "span/opening.h"
#include "span/rows.h"
#include "span/small.h"

namespace dreamcomm {
namespace {

/// After it was opened.
void run_large(Trip& trip, const Request& request) {
  switch (request.kind) {
    case Kind::kAllReduce:
      return spans::all_reduce(trip, request);
    case Kind::kReduce:
      return spans::reduce(trip, request);
    case Kind::kReduceScatter:
      return spans::reduce_scatter(trip, request);
    case Kind::kAllGather:
      return spans::all_gather(trip, request);
    case Kind::kBroadcast:
      return spans::broadcast(trip, request);
    case Kind::kGather:
      return spans::gather(trip, request);
    case Kind::kScatter:
      return spans::scatter(trip, request);
    case Kind::kAllToAll:
      return spans::all_to_all(trip, request);
    default:
      return;
  }
}

}  // namespace

Bridge::Bridge(Communicator& host, Topology topology, int rank, std::unique_ptr<Link> link,
               BridgeOptions options)
    : host_(host),
      topology_(std::move(topology)),
      rank_(rank),
      link_(std::move(link)),
      options_(std::move(options)),
      levels_{host_, topology_,           *link_, nudger_, options_.heap, spoilt_, options_.told,
              rank_, options_.chunk_bytes} {}

Bridge::~Bridge() { close(); }

/// The ranks of this host are told first, then the others, who look for it when the link ends.
void Bridge::give_up(const std::string& reason) {
  host_.abort(reason);
  if (told_.take() == 0 && options_.tell) options_.tell(reason);
  close();
}

void Bridge::close() {
  link_->close();
  nudger_.nudge();
}

void Bridge::run_ordered(const Request& request, const Interrupt& interrupt) {
  validate(request, rank_, topology_.size());
  Trip trip(levels_, request, calls_, interrupt);
  ++calls_;
  try {
    run(trip, request);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kMismatch) throw;
    const std::string call = dreamcomm::describe(request);
    const std::string what = error.what();
    const std::string reason = what.starts_with(call) ? what : concat(call, ": ", what);
    give_up(reason);
    throw Error(error.kind(), reason);
  } catch (...) {
    give_up(concat(dreamcomm::describe(request), " was interrupted on rank ", rank_));
    throw;
  }
  const auto kind = static_cast<std::size_t>(request.kind);
  sent_[kind].grow(static_cast<std::int64_t>(trip.traffic().sent));
  received_[kind].grow(static_cast<std::int64_t>(trip.traffic().received));
}

void Bridge::run(Trip& trip, const Request& request) {
  open(trip, signature_of(request, calls_, Signature::kNoRow), options_.call_site,
       opening_part(trip, request));
  if (!ends_with_opening(request.kind, wire_bytes(request))) run_large(trip, request);
}

std::string Bridge::describe() const {
  return concat(topology_.hosts(), " hosts: ", topology_.words(), "; between them ",
                link_->describe());
}

std::string Bridge::explain(Kind kind, std::size_t bytes) const {
  const std::string way =
      ends_with_opening(kind, bytes)
          ? "one leader per host exchanges it, whole, as the call opens"
          : concat(topology_.carriers(), " of the ranks of each host carry a share between hosts");
  return concat(name(kind), " of ", bytes, " bytes: hierarchical: ", way, "\n  (", describe(), ')');
}

std::array<WireTraffic, kKinds> Bridge::traffic() const {
  std::array<WireTraffic, kKinds> all;
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = {static_cast<std::uint64_t>(sent_[i].read()),
              static_cast<std::uint64_t>(received_[i].read())};
  }
  return all;
}

}  // namespace dreamcomm
