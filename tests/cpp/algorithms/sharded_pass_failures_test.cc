// Errors of sharded passes and their texts: mismatch, lateness, death, abort.
#include <doctest.h>
#include <unistd.h>

#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/support/calls.h"
#include "cpp/support/expected_errors.h"
#include "cpp/support/ranks.h"
#include "cpp/support/sharded_plan.h"

namespace dreamcomm::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::vector<Part> two_parts(int size) {
  const auto world = static_cast<std::size_t>(size);
  return {{{}, std::vector<std::size_t>(world, 100)}, {{}, {1}, true}};
}

/// What one rank calls while its peers make a pass that reads and writes.
struct Other {
  std::string text;
  const Plan* plan = nullptr;  // null: `plain` is called
  bool reads = true;
  bool writes = true;
  Case plain{};
};

Caught failure_of_other(Communicator& comm, const Other& other) {
  if (other.plan == nullptr) return caught([&] { run_case(comm, other.plain); });
  Tensors tensors(*other.plan, comm.rank());
  Subtraction pass(*other.plan, tensors, other.reads, other.writes);
  const Caught error = caught([&] { comm.run(request_of(pass)); });
  pass.require_not_begun();
  tensors.require_unchanged();
  return error;
}

TEST_CASE("a sharded pass and another call raise on every rank, naming both, and harm nothing") {
  for (const int size : {2, 3, 4}) {
    const Plan plan(size, 0, two_parts(size), 3);
    std::vector<Part> parts = two_parts(size);
    ++parts[0].counts[0];
    const Plan larger(size, 0, parts, 3);
    parts = two_parts(size);
    parts.push_back({{}, std::vector<std::size_t>(static_cast<std::size_t>(size), 0)});
    const Plan longer(size, 0, parts, 3);
    const std::size_t elements = static_cast<std::size_t>(size) * 100 + 1;
    parts = two_parts(size);
    std::swap(parts[0], parts[1]);
    const Plan swapped(size, 0, parts, 3);
    const auto sharded = [](const char* what, std::size_t count, std::size_t bytes) {
      return concat(what, ", ", count, " parameters, ", bytes, " bytes, digest ");
    };
    const std::string text = concat("all_reduce(SUM, ", elements, " x float32");
    Case plain{Kind::kAllReduce, DType::kFloat32, ReduceOp::kSum, elements};
    Case in_heap = plain;
    in_heap.place = Place::kHeap;
    const std::vector<Other> others{
        {.text = text, .plain = plain},
        {.text = text, .plain = in_heap},
        {.text = "barrier(", .plain = {.kind = Kind::kBarrier}},
        {.text = sharded("all_reduce(sharded step", 3, elements * 4), .plan = &longer},
        {.text = sharded("all_reduce(sharded step", 2, elements * 4 + 4), .plan = &larger},
        {.text = sharded("all_reduce(sharded step", 2, elements * 4), .plan = &swapped},
        {.text = sharded("reduce_scatter(sharded reduction", 2, elements * 4),
         .plan = &plan,
         .writes = false},
        {.text = sharded("all_gather(sharded write", 2, elements * 4),
         .plan = &plan,
         .reads = false}};

    const auto body = [&](Communicator& comm) {
      Tensors tensors(plan, comm.rank());
      int wrong = 0;
      for (const Other& other : others) {
        wrong = (wrong + 1) % comm.size();
        const Caught error =
            failure_of_other(comm, comm.rank() == wrong ? other : Other{.text = "", .plan = &plan});
        expect(
            error, ErrorKind::kMismatch,
            {concat("rank ", wrong, " called ", other.text),
             sharded("called all_reduce(sharded step", 2, elements * 4), "the group stays usable"});
        step(plan, tensors, false, run_on(comm));
        tensors.reset();
        run_case(comm, kSum);
      }
    };
    for (const Transport transport : transports()) {
      const Setup setup{.transport = transport, .size = size, .heap_bytes = kHeapBytes};
      CAPTURE(setup);
      CHECK_NOTHROW(run_ranks(setup, body));
    }
  }
}

/// Runs `body` on three ranks with a plan of two parts, over each transport.
void on_three(const std::function<void(Communicator&, const Plan&, Tensors&)>& body,
              const std::vector<int>& may_die = {}) {
  const Plan plan(3, 0, two_parts(3), 3);
  for (const Transport transport : transports()) {
    if (!may_die.empty() && transport == Transport::kLocal) continue;  // no thread dies alone
    const Setup setup{.transport = transport, .size = 3, .heap_bytes = kHeapBytes};
    CAPTURE(setup);
    CHECK_NOTHROW(run_ranks(
        setup,
        [&](Communicator& comm) {
          Tensors tensors(plan, comm.rank());
          step(plan, tensors, false, run_on(comm));
          tensors.reset();
          body(comm, plan, tensors);
        },
        may_die));
  }
}

Caught failure_of_pass(Communicator& comm, const Plan& plan, Tensors& tensors,
                       Clock::duration patience = seconds(60)) {
  Subtraction pass(plan, tensors, true, true);
  return caught([&] { comm.run(request_of(pass, Clock::now() + patience)); });
}

TEST_CASE("an exception in apply() ends a sharded pass on every rank") {
  struct Stop {};
  on_three([](Communicator& comm, const Plan& plan, Tensors& tensors) {
    if (comm.rank() != 1) {
      expect(failure_of_pass(comm, plan, tensors), ErrorKind::kPeerLost,
             {"rank 1", "all_reduce(sharded step, 2 parameters", "interrupted"});
    } else {
      Subtraction pass(plan, tensors, true, true);
      pass.in_apply = [] { throw Stop{}; };
      bool stopped = false;
      try {
        comm.run(request_of(pass));
      } catch (const Stop&) {
        stopped = true;
      }
      require(stopped, "the exception was swallowed");
    }
    expect(caught([&] { run_case(comm, kSum); }), ErrorKind::kAborted, {"unusable"});
  });
}

TEST_CASE("a tensor that does not lie in the heap ends a sharded pass on every rank") {
  for (const Transport transport : transports()) {
    const Plan plan(2, 0, two_parts(2), 3);
    const Setup setup{.transport = transport, .size = 2, .heap_bytes = kHeapBytes};
    CAPTURE(setup);
    CHECK_NOTHROW(run_ranks(setup, [&](Communicator& comm) {
      class Elsewhere final : public ShardedPass {
       public:
        std::span<const ShardedPart> parts() const override { return {&part_, 1}; }
        bool reads() const override { return true; }
        bool writes() const override { return false; }
        double factor() const override { return 0; }
        void apply(std::size_t, std::size_t, std::size_t, const std::byte*) override {}
        void touch(std::size_t) override {}

       private:
        float memory_ = 0;
        ShardedPart part_{
            .present = true, .gradient = reinterpret_cast<std::byte*>(&memory_), .numel = 1};
      } pass;
      Request request;
      request.kind = Kind::kReduceScatter;
      request.pass = &pass;
      const Caught error = caught([&] { comm.run(request); });
      if (error.kind == ErrorKind::kInvalid) {
        expect(error, ErrorKind::kInvalid, {"heap of rank"});
      } else {  // the peer was earlier
        expect(error, ErrorKind::kPeerLost, {"does not lie in the heap of rank"});
      }
    }));
  }
}

TEST_CASE("a rank that is killed in apply() ends a sharded pass at once") {
  const auto body = [](Communicator& comm, const Plan& plan, Tensors& tensors) {
    const auto begin = Clock::now();
    Subtraction pass(plan, tensors, true, true);
    if (comm.rank() == 2) pass.in_apply = [] { _exit(9); };
    const Caught error = caught([&] { comm.run(request_of(pass)); });
    // The first rank to notice may abort the group before the other one notices.
    expect(error, ErrorKind::kPeerLost,
           {"rank 2", "ended", "all_reduce(sharded step, 2 parameters"});
    require(Clock::now() - begin < seconds(30), "only the deadline ended the wait");
  };
  on_three(body, {2});
}

TEST_CASE("a rank that leaves before a sharded pass is named") {
  on_three([](Communicator& comm, const Plan& plan, Tensors& tensors) {
    if (comm.rank() == 1) return;
    expect(failure_of_pass(comm, plan, tensors), ErrorKind::kPeerLost, {"rank 1"});
    tensors.require_unchanged();
  });
}

TEST_CASE("abort from another thread ends a sharded pass on every rank") {
  on_three([](Communicator& comm, const Plan& plan, Tensors& tensors) {
    std::promise<void> inside;
    std::thread aborting;
    if (comm.rank() == 0) {
      aborting = std::thread([&] {
        inside.get_future().wait();
        comm.abort("enough");
      });
    }
    Subtraction pass(plan, tensors, true, true);
    bool first = true;
    pass.in_apply = [&] {
      if (std::exchange(first, false) && comm.rank() == 0) {
        inside.set_value();
        aborting.join();
      }
    };
    // The peers' pass fails, as they turn after the abort. Rank 0's own may succeed.
    const Caught error = caught([&] {
      comm.run(request_of(pass));
      if (comm.rank() == 0) run_case(comm, kSum);
    });
    const bool own = comm.rank() == 0 && error.kind == ErrorKind::kAborted;
    expect(error, own ? ErrorKind::kAborted : ErrorKind::kPeerLost, {"enough"});
  });
}

TEST_CASE("a rank that is late in apply() is named at the deadline") {
  on_three([](Communicator& comm, const Plan& plan, Tensors& tensors) {
    if (comm.rank() == 2) {
      Subtraction pass(plan, tensors, true, true);
      bool first = true;
      pass.in_apply = [&] {
        if (std::exchange(first, false)) std::this_thread::sleep_for(milliseconds(300));
      };
      expect(caught([&] { comm.run(request_of(pass)); }), ErrorKind::kPeerLost,
             {"has aborted the group", "timeout"});
      return;
    }
    const Caught error = failure_of_pass(comm, plan, tensors, milliseconds(100));
    const auto kind =
        error.kind == ErrorKind::kTimeout ? ErrorKind::kTimeout : ErrorKind::kPeerLost;
    expect(error, kind, {"for rank 2", "all_reduce(sharded step, 2 parameters"});
  });
}

TEST_CASE("a rank that is late for a sharded pass is named at the deadline") {
  on_three([](Communicator& comm, const Plan& plan, Tensors& tensors) {
    if (comm.rank() == 2) {
      expect(wait_for_end_of(comm, 0), ErrorKind::kPeerLost, {"rank 0 has aborted the group"});
      expect(wait_for_end_of(comm, 1), ErrorKind::kPeerLost, {"rank 1 has aborted the group"});
      expect(failure_of_pass(comm, plan, tensors), ErrorKind::kPeerLost,
             {"has aborted the group", "timeout"});
    } else {
      const Caught error = failure_of_pass(comm, plan, tensors, milliseconds(100));
      const auto kind =
          error.kind == ErrorKind::kTimeout ? ErrorKind::kTimeout : ErrorKind::kPeerLost;
      expect(error, kind, {"rank 2", "all_reduce(sharded step, 2 parameters"});
    }
    tensors.require_unchanged();
  });
}

}  // namespace
}  // namespace dreamcomm::testing
