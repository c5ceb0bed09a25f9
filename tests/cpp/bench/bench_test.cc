// What the benchmark times below torch: the bare core and the bare copies.
#include <doctest.h>

#include <array>
#include <memory>
#include <vector>

#include "bench/trial.h"
#include "cpp/support/ranks.h"

namespace dreamcomm::testing {
namespace {

constexpr std::array kKinds{Kind::kAllReduce, Kind::kReduce,        Kind::kAllGather,
                            Kind::kBroadcast, Kind::kReduceScatter, Kind::kAllToAll};

/// The tensors of a trial of `rows` calls with blocks of `count` floats.
class Tensors {
 public:
  Tensors(Kind kind, std::size_t size, std::size_t count, std::size_t rows, Heap* heap)
      : rows_(rows) {
    const std::size_t many = size * count;
    in_count_ = kind == Kind::kReduceScatter || kind == Kind::kAllToAll ? many : count;
    out_count_ = kind == Kind::kAllGather || kind == Kind::kAllToAll ? many : count;
    in_ = make(in_count_ * rows, heap);
    out_ = make(out_count_ * rows, heap);
  }
  Trial trial(Kind kind) const {
    Trial trial;
    trial.kind = kind;
    trial.in = {in_.get(), in_count_ * rows_ * sizeof(float)};
    trial.out = {out_.get(), out_count_ * rows_ * sizeof(float)};
    trial.rows = rows_;
    trial.samples = 2;
    return trial;
  }
  std::span<const float> out() const {
    return {reinterpret_cast<const float*>(out_.get()), out_count_ * rows_};
  }

 private:
  static std::shared_ptr<std::byte> make(std::size_t count, Heap* heap) {
    const std::size_t bytes = count * sizeof(float);
    if (heap != nullptr) return heap->allocate(bytes);
    auto floats = std::make_shared<std::vector<float>>(count);
    return {floats, reinterpret_cast<std::byte*>(floats->data())};
  }
  std::size_t rows_;
  std::size_t in_count_ = 0;
  std::size_t out_count_ = 0;
  std::shared_ptr<std::byte> in_;
  std::shared_ptr<std::byte> out_;
};

/// Every rank's input is rank + 1 everywhere.
void check_result(Kind kind, const Communicator& comm, std::span<const float> out,
                  std::size_t count) {
  const int size = comm.size();
  const float sum = static_cast<float>(size * (size + 1)) / 2;
  for (std::size_t i = 0; i < out.size(); ++i) {
    float expected = sum;
    if (kind == Kind::kBroadcast) expected = 1;
    if (kind == Kind::kReduce && comm.rank() != 0) expected = 0;
    if (kind == Kind::kAllGather || kind == Kind::kAllToAll) {
      expected = static_cast<float>(i / count % static_cast<std::size_t>(size) + 1);
    }
    if (out[i] == expected) continue;  // composing the text takes longer than all the rest
    require(false, concat(name(kind), " left ", out[i], " in element ", i, ", not ", expected));
  }
}

TEST_CASE("core and ceiling move every byte that the collective moves") {
  for (const Transport transport : transports()) {
    for (const int size : {2, 3}) {
      for (const bool shared : {false, true}) {
        const Setup setup{
            .transport = transport, .size = size, .heap_bytes = std::size_t{64} << 20};
        CAPTURE(setup);
        CAPTURE(shared);
        CHECK_NOTHROW(run_ranks(setup, [&](Communicator& comm) {
          for (const Kind kind : kKinds) {
            for (const std::size_t count : {std::size_t{5}, std::size_t{20'003}}) {
              const Tensors tensors(kind, static_cast<std::size_t>(comm.size()), count, 2,
                                    shared ? own_heap() : nullptr);
              const Trial trial = tensors.trial(kind);
              require(time_core(comm, trial).size() == 4, "a time for every call");
              check_result(kind, comm, tensors.out(), count);
              require(time_ceiling(comm, *own_heap(), trial).size() == 4, "a time for each");
              check_result(kind, comm, tensors.out(), count);
            }
          }
        }));
      }
    }
  }
}

template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

bool has(const std::string& text, const char* part) { return text.find(part) != text.npos; }

TEST_CASE("a ceiling that one rank's heap has no room for fails on all ranks") {
  const Setup setup{.size = 3, .heap_bytes = std::size_t{8} << 20};
  CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
    std::shared_ptr<std::byte> hog;
    if (comm.rank() == 1) hog = own_heap()->allocate(std::size_t{7} << 20);
    const Tensors tensors(Kind::kAllReduce, 3, 100, 1, nullptr);
    const std::string said =
        error_of([&] { time_ceiling(comm, *own_heap(), tensors.trial(Kind::kAllReduce)); });
    require(has(said, "one is full"), said);
    time_core(comm, tensors.trial(Kind::kAllReduce));  // the group is as it was
  }));
}

TEST_CASE("trials of wrong sizes and unknown kinds are refused") {
  const Setup setup{.size = 2, .heap_bytes = std::size_t{8} << 20};
  CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
    const Tensors tensors(Kind::kAllReduce, 2, 100, 1, nullptr);
    Trial trial = tensors.trial(Kind::kAllReduce);
    trial.out.bytes = 40;
    for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter}) {
      trial.kind = kind;
      require(has(error_of([&] { time_ceiling(comm, *own_heap(), trial); }), "cannot have rows"),
              "wrong sizes were taken");
      require(has(error_of([&] { time_core(comm, trial); }), "cannot have rows"),
              "wrong sizes were taken");
    }
    trial.kind = Kind::kSend;
    require(has(error_of([&] { time_core(comm, trial); }), "no benchmark of send"), "of send");
  }));
}

TEST_CASE("messages are explained, and no time is predicted for them") {
  const Setup setup{.size = 2, .heap_bytes = std::size_t{8} << 20};
  CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
    for (const Kind kind : {Kind::kSend, Kind::kRecv}) {
      for (const bool in_heaps : {false, true}) {
        require(has(comm.explain(kind, 100, in_heaps), "announced"), "no explanation");
        require(has(error_of([&] { comm.predict(kind, 100, in_heaps); }), "no time is predicted"),
                "a time was predicted");
      }
    }
    require(comm.predict(Kind::kAllReduce, 1 << 20, true).algorithm == "heap", "not in heaps");
  }));
}

}  // namespace
}  // namespace dreamcomm::testing
