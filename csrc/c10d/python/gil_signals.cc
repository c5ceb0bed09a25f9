#include "c10d/base/gil_signals.h"

#include <pybind11/pybind11.h>

#include "c10d/python/interpreter_end.h"

namespace dreamcomm {

void check_signals() {
  if (!on_main_thread() || Py_IsInitialized() == 0) return;
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

bool is_foreign(const std::exception& error) {
  const auto* python = dynamic_cast<const pybind11::error_already_set*>(&error);
  if (python == nullptr) return false;
  return with_gil([&] { return !python->matches(PyExc_RuntimeError); });
}

void without_gil(const std::function<void()>& wait) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) {
    wait();
    return;
  }
  const pybind11::gil_scoped_release release;
  wait();
}

}  // namespace dreamcomm
