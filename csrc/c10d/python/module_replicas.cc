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
    const AutocastCache cache(cache_);
    const ThreadRandom random(generator);
    use_threads(threads);
    return function();
  }

 private:
  /// Autocast keeps casts of parameters for each thread, until its outermost scope there ends; but
  /// that of a replica's thread is in another thread.
  class AutocastCache {
   public:
    explicit AutocastCache(bool enabled) : outer_(at::autocast::is_autocast_cache_enabled()) {
      at::autocast::set_autocast_cache_enabled(enabled);
    }
    AutocastCache(const AutocastCache&) = delete;
    AutocastCache& operator=(const AutocastCache&) = delete;
    ~AutocastCache() {
      at::autocast::clear_cache();
      at::autocast::set_autocast_cache_enabled(outer_);
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
  m.def("add_in_order", &add_in_order, py::arg("terms"), py::arg("own"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace dreamcomm
