// Times the rows of collectives on one GPU that holds all ranks.
//
//   dreamcomm_gpu_rows rows [MIB_PER_RANK]   large tensors, beside the device's copy rate
//   dreamcomm_gpu_rows small                 small all_reduces, beside an empty barrier
//   dreamcomm_gpu_rows verify                few and small calls, untimed: for compute-sanitizer
//
// One cooperative kernel carries out the calls of N ranks, whose tensors are all in the memory of
// one device. So the figures show how close a row gets to the speed of that memory; they say
// nothing about links between GPUs. The rate is the bytes of the row's formula over the time. It is
// compared with the rate of a device-to-device copy in the same run (read and write counted). The
// device's L2 cache serves some bytes that several ranks read at about the same time, or that pass
// through pages, so a share may exceed 1.
//
// A small call is captured in a graph, many times in a row, and so is a barrier with the same
// number of ranks. The times of one call in a replay are compared.
//
// Results are verified first. Prints a line of JSON for each case.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string_view>

#include "gpu/host/select_algorithm.h"
#include "rows.h"
#include "virtual_ranks.cuh"

namespace {

using namespace dreamcomm;
using namespace dreamcomm::benchmark;

constexpr char kLabel[] =
    "one GPU: all ranks share its memory; nothing here is the bandwidth of a link";
constexpr int kRepeats = 20;
constexpr int kWorlds[] = {2, 4, 8};
constexpr int kInGraph = 50;  // calls in a row
constexpr int kFewBlocks = 2;

int blocks_of_each(int size) {
  int processors = 0;
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0),
             "cudaDeviceGetAttribute");
  return std::min(gpu::kMaxBlocks, processors / size);
}

const char* words(bool flag) { return flag ? "true" : "false"; }

Call call_of(const Row& row, std::size_t bytes, int blocks, int lanes) {
  return {.kind = row.kind,
          .row = row.row,
          .bytes = bytes,
          .registered = row.registered,
          .over_itself = row.over_itself,
          .blocks = blocks,
          .lanes = lanes};
}

bool time_rows(std::size_t bytes) {
  const double ceiling = copy_rate(std::size_t{1} << 30, kRepeats);
  bool all_right = true;
  for (const int size : kWorlds) {
    const int blocks = blocks_of_each(size);
    VirtualRanks ranks(size, bytes, blocks);
    for (const Row& row : kRows) {
      ranks.prepare(call_of(row, bytes, blocks, gpu::most_lanes()));
      const bool right = ranks.verify();
      const double seconds = median_seconds(ranks.stream(), kRepeats, [&] { ranks.launch(); });
      const double rate = row.moved(size, static_cast<double>(bytes)) / seconds;
      const bool well = right && ranks.failure() == nullptr;
      all_right = all_right && well;
      std::printf(
          "{\"label\": \"%s\", \"figure\": \"row\", \"call\": \"%s\", \"row\": \"%s\", "
          "\"ranks\": %d, \"bytes\": %zu, \"verified\": %s, \"us\": %.2f, \"gb_per_s\": %.1f, "
          "\"copy_gb_per_s\": %.1f, \"share\": %.3f, \"goal\": 0.85}\n",
          kLabel, row.call, row.name, size, bytes, words(well), 1e6 * seconds, 1e-9 * rate,
          1e-9 * ceiling, rate / ceiling);
      std::fflush(stdout);
    }
  }
  return all_right;
}

/// Calls in a row, captured, so that a replay's time has no part of the host.
class Graph {
 public:
  explicit Graph(VirtualRanks& ranks) : stream_(ranks.stream()) {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed),
               "cudaStreamBeginCapture");
    for (int i = 0; i < kInGraph; ++i) ranks.launch();
    check_cuda(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    const cudaError_t made = cudaGraphInstantiate(&replayed_, graph, 0);
    cudaGraphDestroy(graph);
    check_cuda(made, "cudaGraphInstantiate");
  }
  ~Graph() { cudaGraphExecDestroy(replayed_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// Seconds of one call.
  double seconds() const {
    return median_seconds(
               stream_, kRepeats,
               [&] { check_cuda(cudaGraphLaunch(replayed_, stream_), "cudaGraphLaunch"); }) /
           kInGraph;
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t replayed_ = nullptr;
};

double replayed_seconds(VirtualRanks& ranks, const Call& call) {
  ranks.prepare(call);
  return Graph(ranks).seconds();
}

bool time_small() {
  bool all_right = true;
  for (const int size : kWorlds) {
    const int blocks = blocks_of_each(size);
    VirtualRanks ranks(size, std::size_t{64} << 10, blocks);
    for (const std::size_t kib : {1, 4, 16, 64}) {
      const std::size_t bytes = kib << 10U;
      const gpu::Choice choice = gpu::choose({.kind = Kind::kAllReduce,
                                              .bytes = bytes,
                                              .size = size,
                                              .most_blocks = blocks,
                                              .lanes = gpu::most_lanes()});
      const Call call{.row = choice.row,
                      .bytes = bytes,
                      .over_itself = true,
                      .blocks = choice.grid.blocks,
                      .lanes = choice.grid.lanes};
      ranks.prepare(call);
      const bool right = ranks.verify();
      const double barrier = replayed_seconds(ranks, {.kind = Kind::kBarrier});
      const double seconds = replayed_seconds(ranks, call);
      const bool well = right && ranks.failure() == nullptr;
      all_right = all_right && well;
      std::printf(
          "{\"label\": \"%s\", \"figure\": \"small\", \"call\": \"all_reduce\", \"row\": \"%s\", "
          "\"ranks\": %d, \"bytes\": %zu, \"blocks\": %d, \"verified\": %s, \"us\": %.3f, "
          "\"barrier_us\": %.3f, \"ratio\": %.3f, \"goal\": 1.5}\n",
          kLabel, gpu::name(choice.row).data(), size, bytes, choice.grid.blocks, words(well),
          1e6 * seconds, 1e6 * barrier, seconds / barrier);
      std::fflush(stdout);
    }
  }
  return all_right;
}

bool verify_small() {
  bool all_right = true;
  for (const int size : {2, 3}) {
    // An element of each block; odd; and more than the pages of two blocks hold.
    for (const std::size_t items : {1, 1001, 100'000}) {
      const std::size_t bytes = items * sizeof(float) * static_cast<std::size_t>(size);
      VirtualRanks ranks(size, bytes, kFewBlocks);
      for (const Row& row : kRows) {
        ranks.prepare(call_of(row, bytes, kFewBlocks, 64));
        const bool right = ranks.verify();
        all_right = all_right && right;
        std::printf(
            "{\"label\": \"%s\", \"figure\": \"verified\", \"call\": \"%s\", \"row\": \"%s\", "
            "\"ranks\": %d, \"bytes\": %zu, \"verified\": %s}\n",
            kLabel, row.call, row.name, size, bytes, words(right));
      }
    }
  }
  return all_right;
}

int run(std::string_view mode, std::size_t bytes) {
  gpu::load_kernels();
  if (mode == "small") return time_small() ? 0 : 1;
  if (mode == "verify") return verify_small() ? 0 : 1;
  return time_rows(bytes) ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string_view mode = count > 1 ? arguments[1] : "rows";
  const long mib = count > 2 ? std::atol(arguments[2]) : 256;
  const bool known = mode == "rows" || mode == "small" || mode == "verify";
  if (!known || mib < 1 || mib > 4096) {
    std::fprintf(stderr, "usage: %s [rows [MIB_PER_RANK, 1 to 4096] | small | verify]\n",
                 arguments[0]);
    return 2;
  }
  try {
    return run(mode, static_cast<std::size_t>(mib) << 20U);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dreamcomm_gpu_rows: %s\n", error.what());
    return 1;
  }
}
