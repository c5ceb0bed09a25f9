#include "internode/collectives/dispatch.h"

namespace dreamcomm::spans {

void run(Trip& trip, const Request& request) {
  switch (request.kind) {
    case Kind::kAllReduce:
      return all_reduce(trip, request);
    case Kind::kReduce:
      return reduce(trip, request);
    case Kind::kReduceScatter:
      return reduce_scatter(trip, request);
    case Kind::kAllGather:
      return all_gather(trip, request);
    case Kind::kBroadcast:
      return broadcast(trip, request);
    case Kind::kGather:
      return gather(trip, request);
    case Kind::kScatter:
      return scatter(trip, request);
    case Kind::kAllToAll:
      return all_to_all(trip, request);
    default:
      return;
  }
}

}  // namespace dreamcomm::spans
