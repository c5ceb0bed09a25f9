// The algorithms, one function per row of the table. Each runs one request
// through the rounds; Primitives and Request say what they are given.
#pragma once

#include "algorithms/primitives.h"

namespace dreamcomm::algorithms {

void barrier(Primitives& prims, const Request& request);
void broadcast(Primitives& prims, const Request& request);
void gather(Primitives& prims, const Request& request);  // also all_gather
void scatter(Primitives& prims, const Request& request);
void all_to_all(Primitives& prims, const Request& request);

void one_shot(Primitives& prims, const Request& request);
void direct_reduce(Primitives& prims, const Request& request);  // all_reduce and reduce
void direct_reduce_scatter(Primitives& prims, const Request& request);
void master(Primitives& prims, const Request& request);

// On tensors in the ranks' heaps; run after Primitives::open().
void heap_reduce(Primitives& prims, const Request& request);  // all_reduce and reduce
void heap_reduce_scatter(Primitives& prims, const Request& request);
void heap_all_gather(Primitives& prims, const Request& request);
void heap_broadcast(Primitives& prims, const Request& request);

// Request::pass, in place of a row.
void sharded_pass(Primitives& prims, const Request& request);

void ring_all_reduce(Primitives& prims, const Request& request);
void ring_reduce_scatter(Primitives& prims, const Request& request);
void ring_all_gather(Primitives& prims, const Request& request);

}  // namespace dreamcomm::algorithms
