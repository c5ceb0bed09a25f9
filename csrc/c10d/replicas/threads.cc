#include "c10d/replicas/threads.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <sys/types.h>
#include <unistd.h>

namespace dreamcomm {
namespace {

// The process that has loaded this library.
const pid_t home = getpid();

using Setter = void (*)(int);
using Function = int (*)(int);

/// A function of the libraries that torch computes with, or a null pointer.
template <typename F>
F find(const char* name) {
  void* const torch = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  if (torch == nullptr) return nullptr;
  auto* const found = reinterpret_cast<F>(dlsym(torch, name));
  dlclose(torch);
  return found;
}

}  // namespace

void use_threads(int threads) {
  static const auto openmp = find<Setter>("omp_set_num_threads");
  static const auto mkl = find<Function>("MKL_Set_Num_Threads_Local");
  at::get_num_threads();  // the first call in a thread sets the number that all threads have
  if (openmp != nullptr) openmp(threads);
  if (mkl != nullptr) mkl(threads);
}

void end_idle_threads() {
  if (getpid() != home)
    return;                 // a fork has none of these threads: to end them would wait for ever
  constexpr int kSoft = 1;  // omp_pause_soft
  static const auto pause = find<Function>("omp_pause_resource_all");
  if (pause != nullptr) pause(kSoft);
}

}  // namespace dreamcomm
