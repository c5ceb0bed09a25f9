#include "transport/wait.h"

#include "core/cpus.h"

namespace dreamcomm {

Patience Patience::of(int ranks, bool spans) {
  // An engine between hosts has a thread for each rank, which needs a processor just when we wait.
  if (spans) return 2 * ranks <= usable_cpus() ? Patience{2000, 20} : Patience{10, 2};
  return ranks <= usable_cpus() ? Patience{2000, 20} : Patience{10, 20};
}

}  // namespace dreamcomm
