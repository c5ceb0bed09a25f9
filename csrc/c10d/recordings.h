// The recorders of all groups of this process: a trace is of the whole process.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/recorder.h"

namespace dreamcomm {

class Recordings {
 public:
  static Recordings& of_process();

  /// A group begins. While a trace runs its recorder takes part and is kept.
  void add(const std::shared_ptr<Recorder>& recorder);
  /// Of the groups that are there.
  std::vector<std::shared_ptr<Recorder>> live() const;
  /// Each recorder notes the last `records` operations and `spans` of the timeline.
  /// Throws Error(kInvalid) if a trace runs.
  void start_trace(std::size_t records, std::size_t spans);
  /// Ends it. Those of all groups that were there at some time of it. Throws as above.
  std::vector<std::shared_ptr<Recorder>> stop_trace();

 private:
  struct Trace {
    std::size_t records;
    std::size_t spans;
    std::vector<std::shared_ptr<Recorder>> recorders;
  };
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<Recorder>> known_;
  std::optional<Trace> trace_;
};

}  // namespace dreamcomm
