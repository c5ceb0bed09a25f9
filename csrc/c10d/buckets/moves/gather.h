// The moves of parameters between sharded and replicated.
#pragma once

#include "c10d/buckets/moves/group_calls.h"

namespace dreamcomm {

/// Fills in the other ranks' rows of dense tensors of one type, each on the same rank's device, in
/// one collective. Rows lie in memory one after the other (layout.h). All ranks call it.
void gather_rows(const GroupPtr& group, const TensorList& wholes);

/// Copies of this rank's rows of each tensor, flat: what is left of them where each rank keeps its
/// rows alone. Nothing is sent.
TensorList keep_rows(const GroupPtr& group, const TensorList& wholes);
/// Puts such rows back where they were.
void put_rows(const GroupPtr& group, const TensorList& rows, const TensorList& wholes);

}  // namespace dreamcomm
