// The recorders of all groups of this process: a trace is of the whole process.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/record/recorder.h"

namespace dreamcomm {

class ProcessRecorders {
 public:
  static ProcessRecorders& of_process();

  /// A group begins. While a trace runs its recorder takes part and is kept.
  void add(const std::shared_ptr<Recorder>& recorder);
  /// The recorders of the live groups.
  std::vector<std::shared_ptr<Recorder>> live() const;
  /// Each recorder gets that room. Returns how many traces of that name this process made before.
  /// Throws Error(kInvalid) if one runs.
  int start_trace(const std::string& name, const Book::Room& room);
  /// Ends it. Returns the recorders of all groups that lived during a part of it. Throws as above.
  std::vector<std::shared_ptr<Recorder>> stop_trace();

 private:
  struct Trace {
    Book::Room room;
    std::vector<std::shared_ptr<Recorder>> recorders;
  };
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<Recorder>> known_;
  std::optional<Trace> trace_;
  std::map<std::string, int> made_;  // how many traces of a name
};

}  // namespace dreamcomm
