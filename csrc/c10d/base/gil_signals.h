// The interpreter's signals, and waits without the GIL.
//
// Except for on_main_thread() these are defined in c10d/python/gil_signals.cc. A program without an
// interpreter, as that of the C++ tests, links definitions of its own.
#pragma once

#include <exception>
#include <functional>

namespace dreamcomm {

/// Python runs signal handlers on its main thread only; it is the process's.
bool on_main_thread();

/// Lets Python run its signal handlers if this is the main thread; throws what
/// they raised (Ctrl-C: KeyboardInterrupt) as a Python exception.
void check_signals();

/// True if `error` is Python's own, not a failed call's: Ctrl-C, an exception of a signal's
/// handler, a mistake.
bool is_foreign(const std::exception& error);

/// Runs `wait` with the GIL released if this thread holds it.
void without_gil(const std::function<void()>& wait);

}  // namespace dreamcomm
