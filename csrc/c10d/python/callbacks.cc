#include "c10d/python/callbacks.h"

#include <chrono>
#include <cstdio>
#include <exception>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include "c10d/base/gil_signals.h"
#include "c10d/process/process_call_sites.h"
#include "c10d/python/interpreter_end.h"
#include "core/flag.h"

namespace dreamcomm {
namespace {

namespace py = pybind11;
using std::chrono::milliseconds;
using BackendPtr = c10::intrusive_ptr<DreamBackend>;
using OptionsPtr = c10::intrusive_ptr<DreamOptions>;

/// A Python object that any thread may drop, the GIL held or not.
std::shared_ptr<py::object> shared_object(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            if (Py_IsInitialized() == 0) return;  // the interpreter has ended
            with_gil([held] { delete held; });
          }};
}

/// The function that the interpreter calls at exit. It does not keep the backend alive.
class ExitHook {
 public:
  explicit ExitHook(const BackendPtr& backend) : backend_(backend) {}
  void operator()() const {
    const py::gil_scoped_release release;
    if (const BackendPtr backend = backend_.lock()) backend->close_at_exit();
  }

 private:
  c10::weak_intrusive_ptr<DreamBackend> backend_;
};

/// A call of ExitHook at exit, until this is dropped.
class AtExit {
 public:
  /// With the GIL held.
  explicit AtExit(const BackendPtr& backend) : hook_(py::cast(ExitHook(backend))) {
    const py::module_ atexit = py::module_::import("atexit");
    atexit.attr("register")(hook_);
    unregister_ = atexit.attr("unregister");
  }
  /// The garbage collector may be what drops it, in the midst of any code: nothing
  /// is imported here, nothing thrown, and an exception under way stays so.
  ~AtExit() {
    if (Py_IsInitialized() == 0) {  // the interpreter has ended
      hook_.release();
      unregister_.release();
      return;
    }
    const py::gil_scoped_acquire gil;
    const py::error_scope exception;
    PyObject* none = PyObject_CallOneArg(unregister_.ptr(), hook_.ptr());
    if (none == nullptr) PyErr_WriteUnraisable(hook_.ptr());
    Py_XDECREF(none);
    hook_ = py::object();
    unregister_ = py::object();
  }
  AtExit(const AtExit&) = delete;
  AtExit& operator=(const AtExit&) = delete;

 private:
  py::object hook_;
  py::object unregister_;
};

std::shared_ptr<void> register_exit(const BackendPtr& backend) {
  return with_gil([&] { return std::make_shared<AtExit>(backend); });
}

/// Returns the text of `function` of dreamcomm._torch.call_site, or "" if it fails.
std::string site(const char* function) {
  try {
    return with_gil([function] {
      return py::module_::import("dreamcomm._torch.call_site").attr(function)().cast<std::string>();
    });
  } catch (const std::exception&) {
    return "";  // the interpreter is ending; the peers wait for this rank's answer
  }
}

/// Where a failed call was made. The group's own thread runs no Python: it must not take the GIL,
/// which may be gone for good. So for calls that it runs, or that torch's threads made, this is
/// where the main thread is now.
std::string call_site() {
  if (PyGILState_GetThisThreadState() != nullptr) {
    std::string found = site("call_site");
    if (!found.empty() || PyGILState_Check() != 0) return found;
  }
  constexpr milliseconds kPatience{500};  // for the interpreter, while the peers wait
  const std::shared_ptr<CallSiteService> service = live_process_call_sites();
  const std::string at = service ? service->own(kPatience) : "";
  return at.empty() ? "" : concat(" (its main thread is", at, ")");
}

/// For the thread that answers peers, which stops before the interpreter ends.
std::string main_thread_site() { return site("main_thread_site"); }

/// With the GIL held.
void log_warning(const std::string& text) {
  try {
    py::module_::import("logging").attr("getLogger")("dreamcomm").attr("warning")("%s", text);
  } catch (py::error_already_set& error) {
    // Ctrl-C just now, or what another signal's handler raised: it ends the wait that this warns
    // of.
    if (on_main_thread() && !error.matches(PyExc_Exception)) throw;
    error.discard_as_unraisable("dreamcomm's warning");
  }
}

/// Warns through the logger "dreamcomm". The group's own thread, as in call_site(), leaves that to
/// the thread that answers peers; if that one does not get the GIL soon, it writes to stderr.
void warn(const std::string& text) {
  if (PyGILState_GetThisThreadState() != nullptr) {
    return with_gil([&text] { log_warning(text); });
  }
  constexpr milliseconds kPatience{500};
  const auto told = std::make_shared<Flag>();  // by the thread that takes it first
  const auto taken = std::make_shared<std::promise<void>>();
  if (const std::shared_ptr<CallSiteService> service = live_process_call_sites()) {
    service->post([text, told, taken] {
      with_gil([&] {
        if (told->take() != 0) return;
        taken->set_value();
        log_warning(text);
      });
    });
    taken->get_future().wait_for(kPatience);
  }
  if (told->take() == 0) std::fprintf(stderr, "dreamcomm: %s\n", text.c_str());
}

/// A group that kept a log has ended.
void report(const std::shared_ptr<Recorder>& recorder, const std::string& failure) {
  if (Py_IsInitialized() == 0) return;
  with_gil([&] {
    const py::error_scope exception;
    try {
      py::module_::import("dreamcomm.observe.comm_log").attr("report")(recorder, failure);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("dreamcomm's log");
    }
  });
}

}  // namespace

PythonCallbacks make_callbacks(py::object make_inner) {
  return {[make = shared_object(std::move(make_inner))](const StorePtr& store, int rank, int size,
                                                        const OptionsPtr& options,
                                                        const std::string& device_type) {
            return with_gil([&] {
              return (*make)(store, rank, size, options, device_type).cast<Fallback::Inner>();
            });
          },
          call_site,
          main_thread_site,
          warn,
          report,
          register_exit};
}

void bind_interpreter(py::module_& m) {
  py::class_<ExitHook>(m, "_ExitHook").def("__call__", &ExitHook::operator());
  // Registered before any group's, so run after them: groups may outlive their hooks.
  const py::cpp_function stop(
      [] {
        end_process_call_sites();
        keep_killed_threads();
      },
      py::call_guard<py::gil_scoped_release>());
  py::module_::import("atexit").attr("register")(stop);
}

}  // namespace dreamcomm
