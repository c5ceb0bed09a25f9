#include "c10d/base/gil_signals.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace dreamcomm {

bool on_main_thread() { return syscall(SYS_gettid) == getpid(); }

}  // namespace dreamcomm
