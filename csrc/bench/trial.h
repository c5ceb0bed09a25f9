// One case of a benchmark on the bare core, without torch: the call and its tensors.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "comm/communicator.h"
#include "core/request.h"
#include "transport/shm/heap.h"

namespace dreamcomm {

/// `rows` calls on memory of their own: call i on row i of `in` and of `out`, which
/// hold the blocks of a Request one after the other. In place if both are the same.
struct Trial {
  Kind kind = Kind::kAllReduce;
  DType dtype = DType::kFloat32;
  Block in;
  Block out;
  std::size_t rows = 1;
  int samples = 1;  // times that all rows are rewritten, and then called one by one
  Interrupt interrupt;

  bool in_place() const { return in.data == out.data; }
  Block row(const Block& all, std::size_t index) const {
    const std::size_t bytes = all.bytes / rows;
    return {all.data + index * bytes, bytes};
  }
};

/// Seconds of every call on this rank, `rows * samples` of them. Before each sample the outputs are
/// set to 0 and every input to rank + 1, and the ranks run a barrier, outside of the measured time.
/// All ranks call it alike. `call` runs row `index`.
std::vector<double> time_rows(Communicator& communicator, const Trial& trial,
                              const std::function<void(std::size_t index)>& call);

/// Throws Error(kInvalid) unless the rows hold what a call of the kind takes in blocks
/// of equal size, and the benchmark knows the kind.
void check_blocks(const Communicator& communicator, const Trial& trial);

/// The trial's call through the communicator. SUM, root 0. Throws Error.
std::vector<double> time_core(Communicator& communicator, const Trial& trial);

/// The cost of the same collective if only its bytes are moved, and float32 added for a reduction:
/// no checks, no signatures, flags that are only spun upon. On tensors in heaps, peers' memory is
/// read and written in place. Otherwise it is staged in chunks of the size that proves best here.
/// Throws Error(kInvalid) for kinds that are not measured so.
std::vector<double> time_ceiling(Communicator& communicator, Heap& heap, const Trial& trial);

}  // namespace dreamcomm
