#include "c10d/process/process_recorders.h"

#include "core/error.h"

namespace dreamcomm {

ProcessRecorders& ProcessRecorders::of_process() {
  static ProcessRecorders only;
  return only;
}

void ProcessRecorders::add(const std::shared_ptr<Recorder>& recorder) {
  const std::scoped_lock lock(mutex_);
  std::erase_if(known_, [](const auto& one) { return one.expired(); });
  known_.push_back(recorder);
  if (!trace_) return;
  recorder->open_trace(trace_->room);
  trace_->recorders.push_back(recorder);
}

std::vector<std::shared_ptr<Recorder>> ProcessRecorders::live() const {
  const std::scoped_lock lock(mutex_);
  std::vector<std::shared_ptr<Recorder>> live;
  for (const std::weak_ptr<Recorder>& one : known_) {
    std::shared_ptr<Recorder> recorder = one.lock();
    // A group that has ended may be held for long, and on one rank only.
    if (recorder && !recorder->ended()) live.push_back(std::move(recorder));
  }
  return live;
}

int ProcessRecorders::start_trace(const std::string& name, const Book::Room& room) {
  std::vector<std::shared_ptr<Recorder>> there = live();
  const std::scoped_lock lock(mutex_);
  check(!trace_, ErrorKind::kInvalid, "a trace of this process runs already: stop() it first");
  try {
    for (const auto& recorder : there) recorder->open_trace(room);
  } catch (...) {
    for (const auto& recorder : there) recorder->close_trace();
    throw;
  }
  trace_ = Trace{room, std::move(there)};
  return made_[name]++;
}

std::vector<std::shared_ptr<Recorder>> ProcessRecorders::stop_trace() {
  const std::scoped_lock lock(mutex_);
  check(trace_.has_value(), ErrorKind::kInvalid, "no trace of this process runs");
  std::vector<std::shared_ptr<Recorder>> recorders = std::move(trace_->recorders);
  trace_.reset();
  for (const auto& recorder : recorders) recorder->close_trace();
  return recorders;
}

}  // namespace dreamcomm
