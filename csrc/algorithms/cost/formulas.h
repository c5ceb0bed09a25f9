// What each row of the table costs a rank: the counterpart of algorithms.h.
#pragma once

#include "algorithms/cost/costs.h"

namespace dreamcomm {
struct CallShape;
}

namespace dreamcomm::efforts {

/// Bytes of a rank's tensors, input and output; one tensor where calls work in place.
std::size_t memory(const CallShape& call);

Effort one_turn(const CallShape& call);
Effort one_shot(const CallShape& call);
Effort direct_reduce(const CallShape& call);
Effort master(const CallShape& call);
Effort ring_all_reduce(const CallShape& call);
Effort direct_reduce_scatter(const CallShape& call);
Effort ring_reduce_scatter(const CallShape& call);
Effort broadcast(const CallShape& call);
Effort all_gather(const CallShape& call);
Effort ring_all_gather(const CallShape& call);
Effort gather(const CallShape& call);
Effort scatter(const CallShape& call);
Effort all_to_all(const CallShape& call);
Effort heap_reduce(const CallShape& call);
Effort heap_reduce_scatter(const CallShape& call);
Effort heap_all_gather(const CallShape& call);
Effort heap_all_to_all(const CallShape& call);
Effort heap_broadcast(const CallShape& call);

}  // namespace dreamcomm::efforts
