// Records one rank's operations in a group, while a log or a trace is open.
//
// Two books may be open at a time: the log (sums, and the last operations for a post-mortem) and
// the trace (a timeline). With none open a call reads two pointers more.
//
// Each book has two writers, one for collectives, which run one at a time, and one for messages,
// which the tag matcher's lock guards; their parts are apart. A book lives as long as its recorder,
// because an operation that began while it was open writes its end there. The next caller that
// wants a book with the same room gets it again.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/record/comm_log.h"
#include "core/flag.h"
#include "core/record.h"
#include "core/request.h"
#include "core/timeline.h"
#include "core/tsc_clock.h"

namespace dreamcomm {

struct Book {
  struct Part {
    Part(std::size_t places, int size) : records(places), log(size) {}
    SeqlockRing<Record> records;  // of collectives, the last one may still run
    CommLog log;
  };
  struct Room {  // how many of each are kept
    std::size_t records = 0;
    std::size_t spans = 0;
    bool operator==(const Room&) const = default;
  };
  Book(const Room& of, int size)
      : room(of), collectives(of.records, size), messages(of.records, size), timeline(of.spans) {}
  /// Discards what was recorded until now, and what is still recorded of a call that is under way.
  void begin_anew() {
    const std::int64_t added = collectives.records.added();
    before_collectives.publish(added);
    const std::vector<Record> last = collectives.records.read(added - 1);
    before_call.publish(last.empty() ? 0 : last.back().number);
    before_messages.publish(messages.records.added());
    before_spans.publish(timeline.spans().added());
  }

  const Room room;
  Part collectives;
  Part messages;
  Timeline timeline;  // of collectives
  Mark before_collectives, before_messages, before_spans;
  Mark before_call;  // the number of the last call that does not count
};

class Recorder {
 public:
  struct Origin {
    std::string team{};  // equal for the ranks of a group
    std::string group{};
    int rank = 0;
    int size = 1;
    std::vector<int> world_ranks{};  // of its ranks in the job; empty: the same
    struct HostOf {
      std::string name;
      std::vector<int> ranks;  // in the group
    };
    std::vector<HostOf> hosts{};  // of a group on several
  };
  explicit Recorder(Origin origin) : origin_(std::move(origin)) {}
  /// For a multi-node group. `parts` is the recorder of its ranks on this host; `numbers` are their
  /// ranks in the group. It passes on the messages that it records, and a trace contains both.
  static std::shared_ptr<Recorder> of_hosts(Origin origin, std::shared_ptr<Recorder> parts,
                                            std::vector<int> numbers);

  const Origin& origin() const { return origin_; }
  /// Null in a group of one host.
  const std::shared_ptr<Recorder>& parts() const { return parts_; }

  /// Its group has ended: the records stay for readers that have begun to trace it.
  void end() { ended_.publish(1); }
  bool ended() const { return ended_.read() != 0; }

  /// Any thread. Opening an open book does nothing.
  void open_log(std::size_t records);
  void open_trace(const Book::Room& room);
  void close_trace();
  /// The book opened last, closed or not, or null.
  std::shared_ptr<const Book> log() const;
  std::shared_ptr<const Book> trace() const;

  /// The open books, for the writers.
  Book* open_log_book() const { return log_.read(); }
  Book* open_trace_book() const { return trace_.read(); }
  bool idle() const { return open_log_book() == nullptr && open_trace_book() == nullptr; }
  /// Records a message that has ended. Call it under the tag matcher's lock. In a multi-node group,
  /// which has two tag matchers, any thread.
  void note_message(const Record& message);

 private:
  struct MultiNodeState {
    std::weak_ptr<Recorder> recorder;
    std::vector<int> numbers;  // of this host's ranks in it
    void note_message(Record message) const;
  };

  void write_message(const Record& message);

  const Origin origin_;
  std::shared_ptr<Recorder> parts_;
  std::unique_ptr<const MultiNodeState>
      whole_;            // of the whole group, of which this is a part; null: none
  std::mutex messages_;  // for messages of a group with parts
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Book>> logs_;    // one at the most
  std::vector<std::shared_ptr<Book>> traces_;  // one for each room; the last is the last opened
  Signpost<Book> log_;
  Signpost<Book> trace_;
  Mark ended_;
};

/// The record of a call that begins; `bytes` of one of its blocks.
Record record_of(const Request& request, std::int64_t number, std::size_t bytes,
                 std::int64_t entered_ns);

/// Writes a collective into the open books: as failed, unless done() is called.
class Entry {
 public:
  /// `make` creates the record, and is called only if a book is open. Each book is looked up once:
  /// a book that is opened meanwhile begins with the next call.
  template <typename Make>
  Entry(const Recorder& recorder, TscClock& clock, Make&& make)
      : clock_(clock), log_(recorder.open_log_book()), trace_(recorder.open_trace_book()) {
    if (!wanted()) [[likely]]
      return;
    record_ = make();
    begin();
  }
  ~Entry();
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  /// Records the call's phases, or null.
  Timeline* timeline() const { return trace_ == nullptr ? nullptr : &trace_->timeline; }
  bool wanted() const { return log_ != nullptr || trace_ != nullptr; }
  /// Marks the call as done; what became known during it is in record().
  void done() { write(Record::State::kDone); }
  Record& record() { return record_; }

 private:
  void begin();
  void write(Record::State state);
  TscClock& clock_;
  Book* const log_;
  Book* const trace_;
  Record record_;
};

}  // namespace dreamcomm
