#include "c10d/python/interpreter_end.h"

#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <mutex>

#include "c10d/base/gil_signals.h"

namespace dreamcomm {
namespace {

std::terminate_handler& handler_before() {
  static std::terminate_handler before = nullptr;
  return before;
}

/// INVARIANT: a thread that stops here holds nothing that the end of the process waits for. The
/// groups were closed before the interpreter ended, and the thread's own references keep alive what
/// its frames use.
[[noreturn]] void keep_or_terminate() {
  // A kill is no C++ exception. An exception that nothing catches still ends the process.
  while (!on_main_thread() && !std::current_exception()) pause();
  if (handler_before() != nullptr) handler_before()();
  std::abort();
}

}  // namespace

void keep_killed_threads() {
  static std::once_flag once;
  std::call_once(once, [] { handler_before() = std::set_terminate(keep_or_terminate); });
}

}  // namespace dreamcomm
