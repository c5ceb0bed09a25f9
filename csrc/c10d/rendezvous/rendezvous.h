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

/// As ranks of the job; of the default group none.
std::vector<int> members_of(const DreamOptions& options);
/// torch gives the members of other groups as ranks of this one, of which it has one at a time.
bool is_default(const DreamOptions& options);

/// As errors of its making name it: "a group", "group '1' (ranks 2, 3 of the job)".
std::string group_being_made(const DreamOptions& options);

/// `heap` may be null; `no_heap`: why, where it was wanted. `host` must outlive the meeting.
ShmOptions rendezvous_options(const DreamOptions& options, int size, const PythonCallbacks& host,
                              const std::shared_ptr<Heap>& heap, const std::string& no_heap);
/// As connect_shm(), and meanwhile ranks of the job can learn what this one makes.
ShmResult meet(Store& store, int rank, int size, const ShmOptions& shm,
               const DreamOptions& options);

}  // namespace dreamcomm
