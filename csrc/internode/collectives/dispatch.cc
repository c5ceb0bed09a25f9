#include "internode/collectives/dispatch.h"

namespace dreamcomm::internode {

void run(HierContext& context, const Request& request) {
  switch (request.kind) {
    case Kind::kAllReduce:
      return all_reduce(context, request);
    case Kind::kReduce:
      return reduce(context, request);
    case Kind::kReduceScatter:
      return reduce_scatter(context, request);
    case Kind::kAllGather:
      return all_gather(context, request);
    case Kind::kBroadcast:
      return broadcast(context, request);
    case Kind::kGather:
      return gather(context, request);
    case Kind::kScatter:
      return scatter(context, request);
    case Kind::kAllToAll:
      return all_to_all(context, request);
    default:
      return;
  }
}

}  // namespace dreamcomm::internode
