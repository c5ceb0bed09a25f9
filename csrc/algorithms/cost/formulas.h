// The cost of each row of the table for a rank: the counterpart of algorithms.h.
#pragma once

#include "algorithms/cost/costs.h"

namespace dreamcomm {
struct CallShape;
}

namespace dreamcomm::formulas {

/// Bytes of a rank's tensors, input and output; one tensor where calls work in place.
std::size_t memory(const CallShape& call);

CostTerms one_turn(const CallShape& call);
CostTerms one_shot(const CallShape& call);
CostTerms direct_reduce(const CallShape& call);
CostTerms master(const CallShape& call);
CostTerms ring_all_reduce(const CallShape& call);
CostTerms direct_reduce_scatter(const CallShape& call);
CostTerms ring_reduce_scatter(const CallShape& call);
CostTerms broadcast(const CallShape& call);
CostTerms all_gather(const CallShape& call);
CostTerms ring_all_gather(const CallShape& call);
CostTerms gather(const CallShape& call);
CostTerms scatter(const CallShape& call);
CostTerms all_to_all(const CallShape& call);
CostTerms heap_reduce(const CallShape& call);
CostTerms heap_reduce_scatter(const CallShape& call);
CostTerms heap_all_gather(const CallShape& call);
CostTerms heap_all_to_all(const CallShape& call);
CostTerms heap_broadcast(const CallShape& call);

}  // namespace dreamcomm::formulas
