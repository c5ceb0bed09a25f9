// The GIL for threads that may outlive the interpreter.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

namespace dreamcomm {

/// Call once, when the interpreter is about to end. From then on a thread that CPython kills stops
/// for good where it is, and the process ends as if the thread were asleep.
///
/// CPython up to 3.13 ends a daemon thread that asks for the GIL of an ended interpreter with
/// pthread_exit(), which unwinds the thread's frames. Any thread in a call that has released the
/// GIL gets there: it returns into the destructor of pybind11's gil_scoped_release. That one is
/// noexcept, so the unwinding calls std::terminate(), which would abort the whole process. From
/// 3.14 on CPython stops such threads itself.
void keep_killed_threads();

/// Runs `run` with the GIL and returns or throws what it does. Use it on all threads except the
/// main one, which CPython never kills.
///
/// INVARIANT: no frame of this library is unwound by the end of the interpreter. A kill, when the
/// GIL is taken or in the Python code that runs with it, meets the noexcept function below first:
/// so no catch (...) swallows it, and no lock is released half-way through what it guards.
template <typename Run>
std::invoke_result_t<Run> with_gil(Run&& run) {
  using Result = std::invoke_result_t<Run>;
  std::exception_ptr error;
  std::optional<std::conditional_t<std::is_void_v<Result>, bool, Result>> result;
  [&]() noexcept {
    const pybind11::gil_scoped_acquire gil;
    try {
      if constexpr (std::is_void_v<Result>) {
        run();
      } else {
        result.emplace(run());
      }
    } catch (const std::exception&) {  // not `...`, which catches a kill, too
      error = std::current_exception();
    }
  }();
  if (error) std::rethrow_exception(error);
  if constexpr (!std::is_void_v<Result>) return std::move(*result);
}

}  // namespace dreamcomm
