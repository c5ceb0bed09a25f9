// How the ranks of a new group find each other.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "c10d/base/options.h"
#include "core/store.h"
#include "transport/bootstrap/connect_shm.h"
#include "transport/shm/heap.h"

namespace dreamcomm {

struct PythonCallbacks;

/// The members as ranks of the job; none for the default group.
std::vector<int> members_of(const DreamOptions& options);
/// True if it is the default group; torch has one at a time, and numbers other groups' members by
/// it.
bool is_default(const DreamOptions& options);

/// The name in errors while it is set up: "a group", "group '1' (ranks 2, 3 of the job)".
std::string group_being_made(const DreamOptions& options);

/// `heap` may be null; `no_heap`: why, where it was wanted. `host` must outlive meet().
ShmOptions rendezvous_options(const DreamOptions& options, int size, const PythonCallbacks& host,
                              const std::shared_ptr<Heap>& heap, const std::string& no_heap);
/// As connect_shm(); meanwhile other ranks of the job can read which group this one makes.
ShmResult meet(Store& store, int rank, int size, const ShmOptions& shm,
               const DreamOptions& options);

}  // namespace dreamcomm
