// Errors that tests expect on ranks, as threads and as processes.
#pragma once

#include <doctest.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/p2p/completion.h"
#include "cpp/support/calls.h"
#include "cpp/support/ranks.h"

namespace dreamcomm::testing {

struct Caught {
  ErrorKind kind;
  std::string text;
};

inline Caught caught(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  }
  throw std::runtime_error("expected an error");
}

inline void expect(const Caught& error, ErrorKind kind, const std::vector<std::string>& words) {
  require(error.kind == kind, "another kind of error: " + error.text);
  for (const std::string& word : words) {
    require(error.text.find(word) != std::string::npos,
            "'" + word + "' is missing in: " + error.text);
  }
}

inline void on_each_transport(int size, const std::function<void(Communicator&)>& body,
                              const std::vector<int>& may_die = {}) {
  for (const Transport transport : transports()) {
    const Setup setup{.transport = transport, .size = size, .page_bytes = tiny_page(size)};
    CAPTURE(setup);
    CHECK_NOTHROW(run_ranks(setup, body, may_die));
  }
}

inline const Case kSum{Kind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 100};

/// Returns when `peer` has aborted the group or ended, with the error that says so.
inline Caught wait_for_end_of(Communicator& comm, int peer) {
  Bytes data(8);
  const auto completion =
      comm.receive({data.data(), 8}, peer, 77, Clock::now() + std::chrono::seconds(60));
  return caught([&] { comm.wait(*completion); });
}

}  // namespace dreamcomm::testing
