#include "comm/record/recorder.h"

#include <algorithm>
#include <utility>

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
  if (parts_) parts_->open_trace(room);
  trace_.publish(traces_.back().get());
}

void Recorder::close_trace() {
  trace_.publish(nullptr);
  if (parts_) parts_->close_trace();
}

std::shared_ptr<const Book> Recorder::log() const {
  const std::scoped_lock lock(mutex_);
  return logs_.empty() ? nullptr : logs_.back();
}

std::shared_ptr<const Book> Recorder::trace() const {
  const std::scoped_lock lock(mutex_);
  return traces_.empty() ? nullptr : traces_.back();
}

/// The parts have a log of their own, with room for one record. It has no readers, but with it open
/// a call finds out which rank entered last (Communicator::last_to_come).
std::shared_ptr<Recorder> Recorder::of_hosts(Origin origin, std::shared_ptr<Recorder> parts,
                                             std::vector<int> numbers) {
  auto made = std::make_shared<Recorder>(std::move(origin));
  parts->whole_ = std::make_unique<const MultiNodeState>(MultiNodeState{made, std::move(numbers)});
  parts->open_log(1);
  made->parts_ = std::move(parts);
  return made;
}

void Recorder::MultiNodeState::note_message(Record message) const {
  const std::shared_ptr<Recorder> whole = recorder.lock();
  if (!whole) return;
  if (message.peer >= 0) message.peer = numbers.at(static_cast<std::size_t>(message.peer));
  whole->note_message(message);
}

void Recorder::note_message(const Record& message) {
  if (whole_) return whole_->note_message(message);
  if (!parts_) return write_message(message);
  const std::scoped_lock lock(messages_);
  write_message(message);
}

void Recorder::write_message(const Record& message) {
  if (Book* const log = open_log_book()) {
    log->messages.records.add(message);
    log->messages.log.add(message);
  }
  if (Book* const trace = open_trace_book()) trace->messages.records.add(message);
}

Record record_of(const Request& request, std::int64_t number, std::size_t bytes,
                 std::int64_t entered_ns) {
  // Its blocks may differ, so they are not part of its shape.
  for (const Block& block : request.in) bytes += request.kind == Kind::kAllToAll ? block.bytes : 0;
  return {.number = number,
          .bytes = static_cast<std::int64_t>(bytes),
          .entered_ns = entered_ns,
          .root = request.root,
          .kind = request.kind,
          .op = request.reduction.op,
          .dtype = request.reduction.dtype};
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
