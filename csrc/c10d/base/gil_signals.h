// What the backend asks of the interpreter: signals, and never to wait with the
// GIL held.
#pragma once

#include <exception>
#include <functional>

namespace dreamcomm {

/// Python runs signal handlers on its main thread only; it is the process's.
bool on_main_thread();

/// Lets Python run its signal handlers if this is the main thread; throws what
/// they raised (Ctrl-C: KeyboardInterrupt) as a Python exception.
void check_signals();

/// Whether `error` is Python's and nothing that a failed call raises: Ctrl-C, what a
/// signal's handler raised, a mistake.
bool is_foreign(const std::exception& error);

/// Runs `wait` with the GIL released if this thread holds it.
void without_gil(const std::function<void()>& wait);

}  // namespace dreamcomm
