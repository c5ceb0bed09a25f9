// The functions of Python that the backend calls.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "c10d/base/options.h"
#include "c10d/base/store_ptr.h"
#include "c10d/base/torch_fallback.h"
#include "comm/record/recorder.h"

namespace dreamcomm {

class DreamBackend;

/// Each is called with or without the GIL.
struct PythonCallbacks {
  /// Makes torch's own backend for a device type ("cpu": Gloo, "cuda": NCCL), or for traffic
  /// between nodes ("hosts": Gloo, all connected).
  std::function<Fallback::Inner(const StorePtr& store, int rank, int size,
                                const c10::intrusive_ptr<DreamOptions>& options,
                                const std::string& device_type)>
      make_inner;
  /// Where in the program this thread makes its call: " at file:line", or "" where no Python runs.
  std::function<std::string()> call_site;
  /// Where the program's main thread is now, likewise. On a thread that may wait for the GIL.
  std::function<std::string()> main_thread_site;
  /// Warns the user of what may become an error.
  std::function<void(const std::string&)> warn;
  /// A group that kept a log has ended; `failure` says why, or is empty.
  std::function<void(const std::shared_ptr<Recorder>& recorder, const std::string& failure)> report;
  /// Has close_at_exit() called before the interpreter ends, until the result is dropped.
  std::function<std::shared_ptr<void>(const c10::intrusive_ptr<DreamBackend>&)> register_exit;
};

}  // namespace dreamcomm
