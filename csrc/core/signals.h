// The first call of every thread of the library.
#pragma once

#include <pthread.h>

#include <csignal>

namespace dreamcomm {

/// Signals are for the program's own threads: Python handles Ctrl-C there.
inline void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace dreamcomm
