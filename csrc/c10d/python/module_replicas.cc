#include "c10d/python/module_replicas.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>

#include "c10d/replicas/random.h"
#include "c10d/replicas/sums.h"
#include "c10d/replicas/threads.h"

namespace dreamcomm {
namespace {

/// A thread's grad mode, autocast, modes, saved-tensor hooks and profiler.
class ThreadState {
 public:
  ThreadState() : cache_(at::autocast::is_autocast_cache_enabled()) {}

  /// Calls a function in this thread, in the state of the thread that made this.
  py::object call(const py::function& function, const std::optional<at::Generator>& generator,
                  int threads) const {
    const at::ThreadLocalStateGuard state(state_);
    const AutocastScope autocast(cache_);
    const ThreadRandom random(generator);
    use_threads(threads);
    return function();
  }

 private:
  /// A scope of autocast, with the caller's choice of a cache. The cache is one for all threads,
  /// and is cleared where the outermost scope of any thread ends: that of a replica would drop
  /// casts that others are using.
  class AutocastScope {
   public:
    explicit AutocastScope(bool cache) : outer_(at::autocast::is_autocast_cache_enabled()) {
      at::autocast::increment_nesting();
      at::autocast::set_autocast_cache_enabled(cache);
    }
    AutocastScope(const AutocastScope&) = delete;
    AutocastScope& operator=(const AutocastScope&) = delete;
    ~AutocastScope() {
      at::autocast::set_autocast_cache_enabled(outer_);
      at::autocast::decrement_nesting();
    }

   private:
    bool outer_;
  };

  at::ThreadLocalState state_;
  bool cache_;
};

}  // namespace

void bind_replicas(pybind11::module_& m) {
  py::class_<ThreadState>(m, "ThreadState")
      .def(py::init<>())
      .def("call", &ThreadState::call, py::arg("function"), py::arg("generator"),
           py::arg("threads"));
  m.def("end_idle_threads", &end_idle_threads, py::call_guard<py::gil_scoped_release>());
  m.def("thread_generator", &thread_generator);
  m.def("rewind", &rewind, py::arg("generator"), py::arg("now"), py::arg("before"));
  m.def("add_in_order", &add_in_order, py::arg("terms"), py::arg("own"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace dreamcomm
