// Runs a function as every rank of a torch process group, the ranks being threads.
//
// Each rank has a DreamBackend of its own, made over one HashStore, and a c10d::ProcessGroup on top
// of it. The ranks set their group up as processes do: they map each other's memory, and share the
// process's one heap. There is no Python interpreter, so no call sites are found and no exit hook
// runs.
#pragma once

#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "c10d/backend/backend.h"

namespace dreamcomm::testing {

struct GroupRank {
  int rank;
  int size;
  c10::intrusive_ptr<DreamBackend> backend;
  c10::intrusive_ptr<c10d::ProcessGroup> group;  // of `backend`, for tensors on the CPU
};

struct GroupSetup {
  int size = 2;
  /// Changes the options from fixed costs, a heap of 1 MB and a timeout of 30 seconds.
  std::function<void(DreamOptions&)> options{};
};

/// Runs `body` as every rank and waits for all. Throws with every failed rank's text if a body
/// threw; its group is aborted, so that no other rank waits for it.
void run_group(const GroupSetup& setup, const std::function<void(GroupRank&)>& body);

}  // namespace dreamcomm::testing
