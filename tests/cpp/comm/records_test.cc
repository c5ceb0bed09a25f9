// Records of operations: seqlock rings, sums, timelines.
#include <doctest.h>

#include <array>
#include <atomic>
#include <bit>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "algorithms/signature.h"
#include "comm/record/recorder.h"
#include "core/request.h"
#include "cpp/support/calls.h"
#include "cpp/support/ranks.h"

namespace dreamcomm::testing {
namespace {

struct Thing {
  std::int64_t number = 0;
  std::array<std::int64_t, 5> copies{};
  static Thing of(std::int64_t number) {
    Thing thing{number, {}};
    thing.copies.fill(number);
    return thing;
  }
  using Words = std::array<std::int64_t, 6>;
  Words words() const { return std::bit_cast<Words>(*this); }
  static Thing of(const Words& words) { return std::bit_cast<Thing>(words); }
  bool whole() const {
    for (const std::int64_t copy : copies) {
      if (copy != copies[0]) return false;
    }
    return copies[0] == number || copies[0] == -number;
  }
};

TEST_CASE("a ring keeps the last things in their order") {
  SeqlockRing<Thing> ring(3);
  CHECK(ring.read().empty());
  CHECK(ring.read(-1).empty());
  ring.amend(Thing::of(9));  // there is nothing to replace
  CHECK(ring.read().empty());
  for (int i = 1; i <= 5; ++i) ring.add(Thing::of(i));
  ring.amend(Thing::of(50));
  const std::vector<Thing> kept = ring.read();
  REQUIRE(kept.size() == 3);
  CHECK(kept[0].number == 3);
  CHECK(kept[1].number == 4);
  CHECK(kept[2].number == 50);
  CHECK(ring.added() == 5);
}

TEST_CASE("a record is the same after it went through a ring") {
  SeqlockRing<Record> ring(1);
  const Record one{.number = -1,
                   .bytes = std::int64_t{1} << 62,
                   .entered_ns = 3,
                   .arrived_ns = 4,
                   .ended_ns = 5,
                   .peer = -1,
                   .root = 7,
                   .kind = Kind::kReduceScatter,
                   .op = ReduceOp::kMax,
                   .dtype = DType::kBFloat16,
                   .row = 255,
                   .state = Record::State::kFailed,
                   .in_place = true};
  const Record other{.peer = 8, .root = -2, .state = Record::State::kDone};
  for (const Record& record : {one, other}) {
    ring.add(record);
    REQUIRE(ring.read().size() == 1);
    CHECK(ring.read()[0] == record);
  }
  SeqlockRing<Span> spans(1);
  const Span span{.call = -1, .begin_ns = 2, .end_ns = 3, .phase = Phase::kCopyOut};
  spans.add(span);
  CHECK(spans.read().at(0) == span);
}

TEST_CASE("a ring without places keeps nothing") {
  SeqlockRing<Thing> ring(0);
  ring.add(Thing::of(1));
  ring.amend(Thing::of(1));
  CHECK(ring.read().empty());
}

TEST_CASE("things read from a ring are whole while its writer continues") {
  SeqlockRing<Thing> ring(4);
  std::atomic<bool> over{false};
  std::jthread writer([&] {
    for (std::int64_t i = 1; i <= 100'000; ++i) {
      ring.add(Thing::of(i));
      Thing amended = Thing::of(i);
      amended.copies.fill(-i);
      ring.amend(amended);
    }
    over = true;
  });
  std::size_t read = 0;
  bool whole = true;
  bool ordered = true;
  while (!over || read == 0) {
    std::int64_t last = 0;
    for (const Thing& thing : ring.read()) {
      whole = whole && thing.whole();
      ordered = ordered && thing.number > last;
      last = thing.number;
      ++read;
    }
  }
  CHECK(whole);
  CHECK(ordered);
}

Record lasting(std::int64_t nanoseconds) {
  return {.bytes = 64,
          .entered_ns = 1000,
          .ended_ns = 1000 + nanoseconds,
          .kind = Kind::kAllReduce,
          .state = Record::State::kDone};
}

TEST_CASE("quantiles are those of the durations, to 6 %") {
  CommLog log(2);
  for (std::int64_t i = 1; i <= 1000; ++i) log.add(lasting(i * 1000));
  const std::vector<CommLog::Line> lines = log.lines();
  REQUIRE(lines.size() == 1);
  CHECK(lines[0].calls == 1000);
  CHECK(lines[0].total_ns == 500'500'000);
  CHECK(lines[0].p50_ns == doctest::Approx(500'000).epsilon(0.0626));
  CHECK(lines[0].p99_ns == doctest::Approx(990'000).epsilon(0.0626));
}

TEST_CASE("durations of any length are counted") {
  for (const std::int64_t length : {std::int64_t{0}, std::int64_t{1}, std::int64_t{7},
                                    std::int64_t{1} << 40, std::int64_t{1} << 60}) {
    Histogram histogram;
    histogram.add(length);
    CHECK(histogram.quantile(0.5) > 0);
    if (length > 8 && length <= std::int64_t{1} << 43) {
      CHECK(static_cast<double>(histogram.quantile(0.5)) ==
            doctest::Approx(static_cast<double>(length)).epsilon(0.0626));
    }
  }
  CHECK(Histogram().quantile(0.5) == 0);
}

TEST_CASE("a log names the rank that was waited for longest") {
  CommLog log(3);
  const auto wait = [&](std::int32_t rank, std::int64_t nanoseconds) {
    Record record = lasting(10'000);
    record.arrived_ns = record.entered_ns + nanoseconds;
    record.peer = rank;
    log.add(record);
  };
  wait(0, 0);
  wait(1, 4000);
  wait(2, 3000);
  wait(2, 3000);
  wait(1, 90'000);  // longer than the call: no more than all of it
  const CommLog::Line line = log.lines().at(0);
  CHECK(line.waited_ns == 20'000);
  CHECK(line.slowest == 1);
  CHECK(line.for_slowest_ns == 14'000);
}

TEST_CASE("failed operations count apart") {
  CommLog log(2);
  Record record = lasting(10);
  record.state = Record::State::kFailed;
  log.add(record);
  const CommLog::Line line = log.lines().at(0);
  CHECK(line.calls == 0);
  CHECK(line.failed == 1);
  CHECK(line.total_ns == 0);
}

TEST_CASE("sizes beyond the limit share a line, and none is lost") {
  CommLog log(2);
  const auto many = static_cast<std::int64_t>(CommLog::kMostLines) + 100;
  for (int round = 0; round < 2; ++round) {
    for (std::int64_t size = 1; size <= many; ++size) {
      Record record = lasting(10);
      record.bytes = size;
      log.add(record);
    }
  }
  const std::vector<CommLog::Line> lines = log.lines();
  CHECK(lines.size() == CommLog::kMostLines + 1);
  std::int64_t calls = 0;
  for (const CommLog::Line& line : lines) calls += line.calls;
  CHECK(calls == 2 * many);
  CHECK(lines.front().bytes == -1);
  CHECK(lines.front().calls == 2 * 100);
  Record other = lasting(10);
  other.kind = Kind::kBroadcast;
  log.add(other);
  CHECK(log.lines().size() == CommLog::kMostLines + 2);
}

TEST_CASE("a timeline joins what follows in one phase") {
  Timeline timeline(10);
  timeline.begin(1, 100);
  timeline.mark(Phase::kCopyIn, 110);
  timeline.mark(Phase::kCopyIn, 120);
  timeline.mark(Phase::kWait, 150);
  timeline.begin(2, 200);
  timeline.mark(Phase::kWait, 210);
  const std::vector<Span> spans = timeline.spans().read();
  REQUIRE(spans.size() == 3);
  CHECK(spans[0].begin_ns == 100);
  CHECK(spans[0].end_ns == 120);
  CHECK(spans[1].begin_ns == 120);
  CHECK(spans[2].begin_ns == 200);
  CHECK(spans[2].call == 2);
}

TEST_CASE("a timeline records spans that are no phase of a call") {
  Timeline timeline(10);
  timeline.begin(1, 100);
  timeline.mark(Phase::kWait, 110);
  timeline.note({.call = 7, .begin_ns = 90, .end_ns = 130, .phase = Phase::kBetween});
  timeline.mark(Phase::kWait, 140);
  const std::vector<Span> spans = timeline.spans().read();
  REQUIRE(spans.size() == 3);
  CHECK(spans[1].call == 7);
  CHECK(spans[1].phase == Phase::kBetween);
  CHECK(spans[2].begin_ns == 110);
  CHECK(timeline.last_ns() == 140);
}

TEST_CASE("a multi-node group records the messages of both levels, with the group's ranks") {
  const auto parts = std::make_shared<Recorder>(Recorder::Origin{.rank = 0, .size = 2});
  const auto whole =
      Recorder::of_hosts({.rank = 1, .size = 4, .hosts = {{"a", {1, 3}}}}, parts, {1, 3});
  const Record message{.bytes = 8, .peer = 1, .kind = Kind::kSend, .state = Record::State::kDone};
  CHECK_FALSE(parts->idle());  // calls within the host find out which rank entered last
  CHECK(whole->idle());
  parts->note_message(message);
  whole->open_log(10);
  parts->note_message(message);
  whole->note_message({.bytes = 8, .peer = 2, .kind = Kind::kSend, .state = Record::State::kDone});
  const std::vector<Record> noted = whole->log()->messages.records.read();
  REQUIRE(noted.size() == 2);
  CHECK(noted[0].peer == 3);
  CHECK(noted[1].peer == 2);
  CHECK(parts->log()->messages.records.added() == 0);
  CHECK(whole->log()->messages.log.lines().at(0).calls == 2);
  whole->open_trace({10, 10});
  CHECK(parts->open_trace_book() != nullptr);
  whole->close_trace();
  CHECK(parts->open_trace_book() == nullptr);
}

TEST_CASE("the time of the last rank to enter is known whatever the clock says") {
  for (const std::int64_t own :
       {std::int64_t{1000}, (std::int64_t{1} << 48) - 5, (std::int64_t{5} << 48) + 3}) {
    const auto sent = [](std::int64_t ns) {
      return static_cast<std::uint64_t>(ns) & Arrival::kMask;
    };
    Arrival arrival(own, 7);
    CHECK(arrival.last_ns() == own);
    CHECK(arrival.last_rank() == 7);
    arrival.see(sent(own - 900), 1);
    CHECK(arrival.last_rank() == 7);
    arrival.see(sent(own + 20), 2);
    arrival.see(sent(own + 10), 3);
    CHECK(arrival.last_ns() == own + 20);
    CHECK(arrival.last_rank() == 2);
  }
}

std::vector<Record> noted(const Communicator& comm) {
  const auto book = comm.recorder()->log();
  return book ? book->collectives.records.read() : std::vector<Record>{};
}

TEST_CASE("ranks record their calls, and which rank entered last") {
  for (const Transport transport : transports()) {
    const Setup setup{.transport = transport, .size = 3};
    CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
      std::array<float, 300> data{};
      const Block block{reinterpret_cast<std::byte*>(data.data()), sizeof data};
      Request request;
      request.kind = Kind::kAllReduce;
      request.reduction = {.dtype = DType::kFloat32, .op = ReduceOp::kSum};
      request.in = request.out = std::span(&block, 1);
      comm.run(request);  // before the log is open
      comm.recorder()->open_log(10);
      require(noted(comm).empty(), "a call was noted before the log was open");
      comm.run(Request{});
      comm.run(request);
      const std::vector<Record> records = noted(comm);
      require(records.size() == 2, concat(records.size(), " records of 2 calls"));
      const Record& last = records[1];
      require(last.number == 3 && last.kind == Kind::kAllReduce && last.bytes == sizeof data &&
                  last.dtype == DType::kFloat32 && last.op == ReduceOp::kSum,
              "the record is of another call");
      require(last.state == Record::State::kDone && last.entered_ns > 0, "it is not done");
      require(last.arrived_ns >= last.entered_ns && last.ended_ns >= last.arrived_ns,
              "its times are out of order");
      require(last.peer >= 0 && last.peer < 3, concat("rank ", last.peer, " entered last"));
    }));
  }
}

TEST_CASE("a trace has the phases of every call of every algorithm, without gaps") {
  for (const char* algorithm : {"direct", "one_shot", "ring", "master"}) {
    Setup setup{.size = 3, .page_bytes = tiny_page(3)};
    setup.comm.algorithm = algorithm;
    setup.comm.fixed_order = false;
    CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
      std::array<float, 3000> data{};
      const Block block{reinterpret_cast<std::byte*>(data.data()), sizeof data};
      Request request;
      request.kind = Kind::kAllReduce;
      request.reduction = {.dtype = DType::kFloat32, .op = ReduceOp::kSum};
      request.in = request.out = std::span(&block, 1);
      comm.recorder()->open_trace({10, 10'000});
      comm.run(request);
      comm.recorder()->close_trace();
      comm.run(request);
      const auto book = comm.recorder()->trace();
      const std::vector<Span> spans = book->timeline.spans().read();
      require(book->collectives.records.added() == 1, "a call was noted after the trace's end");
      require(!spans.empty(), "no phases");
      std::int64_t end = book->collectives.records.read().at(0).entered_ns;
      std::array<int, 4> seen{};
      for (const Span& span : spans) {
        require(span.call == 1 && span.begin_ns == end && span.end_ns >= end, "a gap");
        end = span.end_ns;
        ++seen[static_cast<std::size_t>(span.phase)];
      }
      require(seen[static_cast<std::size_t>(Phase::kWait)] > 0, "no wait");
      require(seen[static_cast<std::size_t>(Phase::kCopyIn)] > 0 || comm.rank() == 0, "no copy in");
      require(seen[static_cast<std::size_t>(Phase::kReduce)] +
                      seen[static_cast<std::size_t>(Phase::kCopyOut)] >
                  0,
              "neither reduced nor copied out");
    }));
  }
}

TEST_CASE("a second trace has nothing of the first, and takes no more memory") {
  CHECK_NOTHROW(run_ranks({.size = 2}, [](Communicator& comm) {
    Recorder& recorder = *comm.recorder();
    std::shared_ptr<const Book> first;
    for (int i = 0; i < 3; ++i) {
      recorder.open_trace({10, 10});
      comm.run(Request{});
      recorder.close_trace();
      const auto book = recorder.trace();
      require(!first || book == first, "another book");
      first = book;
      const auto records = book->collectives.records.read(book->before_collectives.read());
      require(records.size() == 1 && records[0].number == i + 1, "not the call of this trace");
      require(book->timeline.spans().read(book->before_spans.read()).size() == 1, "not its span");
    }
    recorder.open_trace({20, 10});
    require(recorder.trace() != first, "a book of less room");
    recorder.close_trace();
    recorder.open_trace({10, 10});
    require(recorder.trace() == first, "a second book of a room");
  }));
}

TEST_CASE("a call that fails is recorded as failed") {
  Setup setup{.size = 2};
  CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
    comm.recorder()->open_log(10);
    Request request;
    request.kind = comm.rank() == 0 ? Kind::kBarrier : Kind::kBroadcast;
    std::array<std::byte, 8> data{};
    const Block block{data.data(), data.size()};
    if (request.kind == Kind::kBroadcast) request.out = std::span(&block, 1);
    bool threw = false;
    try {
      comm.run(request);
    } catch (const Error& error) {
      threw = error.kind() == ErrorKind::kMismatch;
    }
    require(threw, "the mismatch was not reported");
    const std::vector<Record> records = noted(comm);
    require(records.size() == 1 && records[0].state == Record::State::kFailed, "not noted");
  }));
}

TEST_CASE("messages are recorded with their other side") {
  Setup setup{.size = 2, .message_bytes = 4096};
  CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
    comm.recorder()->open_log(10);
    std::vector<std::byte> data(100'000);
    for (const std::size_t bytes : {std::size_t{100}, data.size()}) {
      const Block block{data.data(), bytes};
      const auto completion = comm.rank() == 0
                                  ? comm.send(block, 1, 5, Clock::time_point::max())
                                  : comm.receive(block, 0, 5, Clock::time_point::max());
      comm.wait(*completion);
    }
    const auto records = comm.recorder()->log()->messages.records.read();
    require(records.size() == 2, concat(records.size(), " records of 2 messages"));
    const Record& last = records.back();
    require(last.kind == (comm.rank() == 0 ? Kind::kSend : Kind::kRecv), "of another kind");
    require(last.peer == 1 - comm.rank() && last.bytes == 100'000, "of another message");
    require(last.ended_ns >= last.entered_ns, "its times are out of order");
    require(comm.traffic()[static_cast<std::size_t>(last.kind)].calls == 2, "not counted");
  }));
}

}  // namespace
}  // namespace dreamcomm::testing
