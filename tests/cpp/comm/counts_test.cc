// Counts that ride in the opening of a call, and divide its sum.
#include "core/counts.h"

#include <cstddef>
#include <string>
#include <vector>

#include "core/error.h"
#include "cpp/support/ranks.h"
#include "doctest.h"

using namespace dreamcomm;
using namespace dreamcomm::testing;

namespace {

constexpr std::size_t kElements = 3000;  // several chunks of a tiny page

std::vector<float> values_of(int rank) {
  return std::vector<float>(kElements, static_cast<float>(rank + 1));
}

void average(Communicator& group, std::vector<float>& values, GradientCounts& counts) {
  const Block block{reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(float)};
  Request request;
  request.kind = Kind::kAllReduce;
  request.reduction = {.dtype = DType::kFloat32, .op = ReduceOp::kAvg};
  request.reduction.counts = &counts;
  request.in = request.out = {&block, 1};
  group.run(request);
}

float sum_of_ranks(int size) { return static_cast<float>(size * (size + 1) / 2); }

Setup setup_of(Transport transport, int size, const std::string& algorithm) {
  Setup setup{.transport = transport, .size = size, .page_bytes = tiny_page(size)};
  setup.comm.algorithm = algorithm;
  setup.delays = 20;
  return setup;
}

}  // namespace

TEST_CASE("counts: the first call takes them, and the next ones divide by the same") {
  for (const Transport transport : transports()) {
    for (const int size : {1, 2, 3, 4}) {
      for (const std::string algorithm : {"auto", "one_shot", "direct", "master"}) {
        run_ranks(setup_of(transport, size, algorithm), [&](Communicator& group) {
          GradientCounts counts(RankCount::of_whole(10 * group.rank() + 1), false);
          const auto total = static_cast<float>(5 * size * (size - 1) + size);
          for (int call = 0; call < 3; ++call) {
            std::vector<float> values = values_of(group.rank());
            average(group, values, counts);
            require(values == std::vector<float>(kElements, sum_of_ranks(size) / total),
                    "the sum over the counts");
          }
        });
      }
    }
  }
}

TEST_CASE("counts: without one no rank moves data, and the group stays usable") {
  for (const Transport transport : transports()) {
    run_ranks(setup_of(transport, 3, "auto"), [](Communicator& group) {
      GradientCounts faulty(
          group.rank() == 1 ? RankCount::of_fault(CountFault::kMissing) : RankCount::of_whole(2),
          false);
      for (int call = 0; call < 2; ++call) {  // the second one is skipped on all ranks
        std::vector<float> values = values_of(group.rank());
        std::string text;
        try {
          average(group, values, faulty);
        } catch (const Error& error) {
          text = error.what();
        }
        require(text.find("rank 1 ran a backward pass without count(n)") != std::string::npos,
                "the rank without a count is named: " + text);
        require(values == values_of(group.rank()), "the values are as before");
      }
      GradientCounts counts(RankCount::of_whole(1), false);
      std::vector<float> values = values_of(group.rank());
      average(group, values, counts);
      require(values == std::vector<float>(kElements, 2), "the next call works");
    });
  }
}

TEST_CASE("counts: a rank that gives none to a call in which others do makes another call") {
  run_ranks(setup_of(Transport::kLocal, 2, "auto"), [](Communicator& group) {
    std::vector<float> values = values_of(group.rank());
    GradientCounts counts(RankCount::of_whole(1), false);
    if (group.rank() == 0) counts.take(std::vector<std::uint64_t>{counts.own().bits()});
    std::string text;
    try {
      average(group, values, counts);
    } catch (const Error& error) {
      text = error.what();
    }
    require(text.find("all_reduce(AVG, by counts, 3000 x float32") != std::string::npos, text);
  });
}
