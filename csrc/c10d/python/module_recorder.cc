#include "c10d/python/module_recorder.h"

#include <array>
#include <string>

#include "algorithms/table.h"
#include "c10d/process/process_recorders.h"

namespace dreamcomm {
namespace {

using RecorderPtr = std::shared_ptr<Recorder>;

std::string row_name(const Record& record) {
  const auto rows = algorithm_table();
  if (record.kind == Kind::kSend || record.kind == Kind::kRecv) return "";
  if (record.state != Record::State::kDone) return "";
  if (record.row == Record::kSharded) return "sharded";
  if (record.row == Record::kByLeaders) return "leaders";
  if (record.row == Record::kByCarriers) return "carriers";
  if (record.row >= rows.size()) return "";
  return std::string(rows[record.row].name);
}

/// In the order of dreamcomm.observe.records.Record.
py::tuple as_tuple(const Record& record) {
  constexpr std::array kStates{"running", "done", "failed"};
  return py::make_tuple(record.number, std::string(name(record.kind)), record.bytes,
                        std::string(name(record.dtype)), std::string(name(record.op)), record.root,
                        kStates.at(static_cast<std::size_t>(record.state)), row_name(record),
                        record.entered_ns, record.arrived_ns, record.ended_ns, record.peer,
                        record.in_place);
}

/// The records after the first `before`.
py::list all_of(const Book::Part& part, const Mark& before) {
  py::list list;
  for (const Record& record : part.records.read(before.read())) list.append(as_tuple(record));
  return list;
}

struct Spans {
  py::list list;  // (call, phase, begin, end) of each, times in nanoseconds
  std::int64_t others = 0;
};

/// The spans of calls that began in the trace; the others belong to a call under way at its start.
Spans spans_of(const Book& book) {
  constexpr std::array kPhases{"wait", "copy in", "reduce", "copy out", "between hosts"};
  Spans spans;
  for (const Span& span : book.timeline.spans().read(book.before_spans.read())) {
    if (span.call <= book.before_call.read()) {
      ++spans.others;
      continue;
    }
    spans.list.append(py::make_tuple(span.call, kPhases.at(static_cast<std::size_t>(span.phase)),
                                     span.begin_ns, span.end_ns));
  }
  return spans;
}

void append_lines(py::list& list, const CommLog& log) {
  for (const CommLog::Line& line : log.lines()) {
    list.append(py::make_tuple(std::string(name(line.kind)), line.bytes, line.calls, line.failed,
                               line.total_ns, line.waited_ns, line.p50_ns, line.p99_ns,
                               line.in_place, line.slowest, line.for_slowest_ns));
  }
}

/// In the order of dreamcomm.observe.records.Line; None: no log was opened.
py::object log_lines(const Recorder& recorder) {
  const auto book = recorder.log();
  if (!book) return py::none();
  py::list list;
  append_lines(list, book->collectives.log);
  append_lines(list, book->messages.log);
  return list;
}

/// The last records of the log: of collectives, and of messages.
py::object log_records(const Recorder& recorder) {
  const auto book = recorder.log();
  if (!book) return py::none();
  return py::make_tuple(all_of(book->collectives, book->before_collectives),
                        all_of(book->messages, book->before_messages));
}

/// The last trace's collectives, messages and spans, and how many of each were noted in all.
py::object trace_records(const Recorder& recorder) {
  const auto book = recorder.trace();
  if (!book) return py::none();
  const Spans spans = spans_of(*book);
  return py::make_tuple(all_of(book->collectives, book->before_collectives),
                        all_of(book->messages, book->before_messages), spans.list,
                        book->collectives.records.added() - book->before_collectives.read(),
                        book->messages.records.added() - book->before_messages.read(),
                        book->timeline.spans().added() - book->before_spans.read() - spans.others);
}

/// (name, ranks) of each host; none in a group of one host.
py::list recorder_hosts(const Recorder& recorder) {
  py::list list;
  for (const auto& host : recorder.origin().hosts) {
    list.append(py::make_tuple(host.name, host.ranks));
  }
  return list;
}

}  // namespace

void bind_records(py::module_& m) {
  py::class_<Recorder, RecorderPtr>(m, "Recorder", "A rank's notes about its group's operations.")
      .def_property_readonly("team", [](const Recorder& r) { return r.origin().team; })
      .def_property_readonly("group", [](const Recorder& r) { return r.origin().group; })
      .def_property_readonly("rank", [](const Recorder& r) { return r.origin().rank; })
      .def_property_readonly("size", [](const Recorder& r) { return r.origin().size; })
      .def_property_readonly("world_ranks",
                             [](const Recorder& r) { return r.origin().world_ranks; })
      .def_property_readonly("parts", &Recorder::parts)
      .def_property_readonly("hosts", &recorder_hosts)
      .def("open_log", &Recorder::open_log, py::arg("records"))
      .def("log_lines", &log_lines)
      .def("log_records", &log_records)
      .def("trace_records", &trace_records);
  m.def("recorders", [] { return ProcessRecorders::of_process().live(); });
  m.def(
      "start_trace",
      [](const std::string& name, std::size_t records, std::size_t spans) {
        return ProcessRecorders::of_process().start_trace(name, {records, spans});
      },
      py::arg("name"), py::arg("records"), py::arg("spans"));
  m.def("stop_trace", [] { return ProcessRecorders::of_process().stop_trace(); });
}

}  // namespace dreamcomm
