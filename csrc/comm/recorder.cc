#include "comm/recorder.h"

#include <algorithm>

#include "core/request.h"

namespace dreamcomm {

void Recorder::open_log(std::size_t records) {
  const std::scoped_lock lock(mutex_);
  if (logs_.empty()) logs_.push_back(std::make_shared<Book>(Book::Room{records, 0}, origin_.size));
  log_.publish(logs_.back().get());
}

void Recorder::open_trace(const Book::Room& room) {
  const std::scoped_lock lock(mutex_);
  if (trace_.read() != nullptr) return;
  const auto known = std::find_if(traces_.begin(), traces_.end(),
                                  [&](const auto& book) { return book->room == room; });
  if (known == traces_.end()) {
    traces_.push_back(std::make_shared<Book>(room, origin_.size));
  } else {
    std::rotate(known, known + 1, traces_.end());
  }
  traces_.back()->begin_anew();
  trace_.publish(traces_.back().get());
}

std::shared_ptr<const Book> Recorder::log() const {
  const std::scoped_lock lock(mutex_);
  return logs_.empty() ? nullptr : logs_.back();
}

std::shared_ptr<const Book> Recorder::trace() const {
  const std::scoped_lock lock(mutex_);
  return traces_.empty() ? nullptr : traces_.back();
}

void Recorder::note_message(const Record& message) {
  if (Book* const log = open_log_book()) {
    log->messages.records.add(message);
    log->messages.log.add(message);
  }
  if (Book* const trace = open_trace_book()) trace->messages.records.add(message);
}

void Entry::begin() {
  if (log_ != nullptr) log_->collectives.records.add(record_);
  if (trace_ != nullptr) {
    trace_->collectives.records.add(record_);
    trace_->timeline.begin(record_.number, record_.entered_ns);
  }
}

Entry::~Entry() {
  if (wanted() && record_.state == Record::State::kRunning) [[unlikely]]
    write(Record::State::kFailed);
}

void Entry::write(Record::State state) {
  record_.state = state;
  // A done call ends with its last phase, whose end is known.
  const bool is_known = trace_ != nullptr && state == Record::State::kDone &&
                        trace_->timeline.last_ns() > record_.entered_ns;
  record_.ended_ns = is_known ? trace_->timeline.last_ns() : clock_.now_ns();
  if (log_ != nullptr) {
    log_->collectives.records.amend(record_);
    log_->collectives.log.add(record_);
  }
  if (trace_ != nullptr) trace_->collectives.records.amend(record_);
}

}  // namespace dreamcomm
