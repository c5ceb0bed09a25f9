// What one rank notes of its operations in a group, where someone wants to know.
//
// Two books may be open at a time: the log (sums, and the last operations for a post-mortem) and
// the trace (a timeline). With none open a call reads two pointers more.
//
// Each book has two writers, one for collectives, which run one at a time, and one for messages,
// whose lock the mailbox holds; their parts are apart. A book lives as long as its recorder, as
// an operation that began while it was open writes its end there.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/comm_log.h"
#include "core/flag.h"
#include "core/record.h"
#include "core/timeline.h"

namespace dreamcomm {

struct Book {
  struct Part {
    Part(std::size_t places, int size) : records(places), log(size) {}
    Ledger<Record> now{1};   // the collective that began last
    Ledger<Record> records;  // those that have ended
    CommLog log;
  };
  Book(std::size_t places, std::size_t spans, int size)
      : collectives(places, size), messages(places, size), timeline(spans) {}
  Part collectives;
  Part messages;
  Timeline timeline;  // of collectives
};

class Recorder {
 public:
  struct Origin {
    std::string team;  // equal for the ranks of a group
    std::string group;
    int rank = 0;
    int size = 1;
    std::vector<int> world_ranks;  // of its ranks in the job; empty: the same
  };
  explicit Recorder(Origin origin) : origin_(std::move(origin)) {}

  const Origin& origin() const { return origin_; }

  /// Any thread. Opening what is open does nothing.
  void open_log(std::size_t records);
  void open_trace(std::size_t records, std::size_t spans);
  void close_trace() { trace_.publish(nullptr); }
  /// The books opened last, closed or not, or null.
  std::shared_ptr<const Book> log() const;
  std::shared_ptr<const Book> trace() const;

  /// For those that write.
  Book* open_log_book() const { return log_.read(); }
  Book* open_trace_book() const { return trace_.read(); }
  bool idle() const { return open_log_book() == nullptr && open_trace_book() == nullptr; }
  /// A message that has ended. Under the mailbox's lock.
  void note_message(const Record& message);

 private:
  const Origin origin_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Book>> logs_;  // one at the most
  std::vector<std::shared_ptr<Book>> traces_;
  Signpost<Book> log_;
  Signpost<Book> trace_;
};

/// A collective on its way into the open books; failed, unless it is said to be done.
class Entry {
 public:
  Entry(const Recorder& recorder, const Record& record);
  ~Entry();
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  /// Where its phases are noted, or null.
  Timeline* timeline() const { return trace_ == nullptr ? nullptr : &trace_->timeline; }
  bool wanted() const { return log_ != nullptr || trace_ != nullptr; }
  /// It is done; what became known on the way is in record().
  void done() { write(Record::State::kDone); }
  Record& record() { return record_; }

 private:
  void write(Record::State state);
  Book* const log_;
  Book* const trace_;
  Record record_;
};

}  // namespace dreamcomm
