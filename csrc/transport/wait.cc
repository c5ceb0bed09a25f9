#include "transport/wait.h"

#include "core/cpus.h"

namespace dreamcomm {

Patience Patience::of(int ranks) {
  return ranks <= usable_cpus() ? Patience{2000, 20} : Patience{10, 20};
}

}  // namespace dreamcomm
