// The algorithms, one function per row of the table. Each runs one request
// through the rounds; Walk and Request say what they are given.
#pragma once

#include "algorithms/primitives.h"

namespace dreamcomm::algorithms {

void barrier(Walk& walk, const Request& request);
void broadcast(Walk& walk, const Request& request);
void gather(Walk& walk, const Request& request);  // also all_gather
void scatter(Walk& walk, const Request& request);
void all_to_all(Walk& walk, const Request& request);

void one_shot(Walk& walk, const Request& request);
void direct_reduce(Walk& walk, const Request& request);  // all_reduce and reduce
void direct_reduce_scatter(Walk& walk, const Request& request);
void master(Walk& walk, const Request& request);

// On tensors in the ranks' heaps; run after Walk::open().
void heap_reduce(Walk& walk, const Request& request);  // all_reduce and reduce
void heap_reduce_scatter(Walk& walk, const Request& request);
void heap_all_gather(Walk& walk, const Request& request);
void heap_broadcast(Walk& walk, const Request& request);

void ring_all_reduce(Walk& walk, const Request& request);
void ring_reduce_scatter(Walk& walk, const Request& request);
void ring_all_gather(Walk& walk, const Request& request);

}  // namespace dreamcomm::algorithms
