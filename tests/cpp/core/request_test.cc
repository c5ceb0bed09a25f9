#include "core/request.h"

#include <cstddef>
#include <string>
#include <vector>

#include "doctest.h"

using namespace dreamcomm;

namespace {

/// A call with blocks of the given bytes and no memory behind them.
struct Call {
  Call(Kind kind, DType dtype, const std::vector<std::size_t>& in,
       const std::vector<std::size_t>& out, int root = 0, ReduceOp op = ReduceOp::kNone) {
    for (const std::size_t bytes : in) in_.push_back({nullptr, bytes});
    for (const std::size_t bytes : out) out_.push_back({nullptr, bytes});
    request.kind = kind;
    request.reduction.dtype = dtype;
    request.reduction.op = op;
    request.in = in_;
    request.out = out_;
    request.root = root;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  std::string text() const { return describe(request); }
  std::size_t bytes() const { return payload_bytes(request); }

  Request request;

 private:
  std::vector<Block> in_;
  std::vector<Block> out_;
};

}  // namespace

TEST_CASE("describe: texts of calls") {
  const DType f32 = DType::kFloat32;
  CHECK(Call(Kind::kBarrier, DType::kOpaque, {}, {}).text() == "barrier()");
  CHECK(Call(Kind::kAllReduce, f32, {4096}, {4096}, 0, ReduceOp::kSum).text() ==
        "all_reduce(SUM, 1024 x float32)");
  CHECK(Call(Kind::kReduce, f32, {4}, {}, 2, ReduceOp::kMax).text() ==
        "reduce(MAX, 1 x float32, root 2)");
  CHECK(Call(Kind::kReduceScatter, f32, {8, 8}, {8}, 0, ReduceOp::kAvg).text() ==
        "reduce_scatter(AVG, 2 x float32)");
  CHECK(Call(Kind::kAllGather, f32, {8}, {8, 8}).text() == "all_gather(2 x float32)");
  CHECK(Call(Kind::kAllToAll, f32, {8, 4}, {8, 12}).text() ==
        "all_to_all(in 12, out 20 bytes of float32)");
  CHECK(Call(Kind::kAllToAll, DType::kOpaque, {8, 4}, {8, 12}).text() ==
        "all_to_all(in 12, out 20 bytes)");
  CHECK(Call(Kind::kAllGather, f32, {6}, {6, 6}).text() == "all_gather(6 bytes of float32)");
  CHECK(Call(Kind::kSend, DType::kOpaque, {6}, {}).text() == "send(6 bytes)");
  CHECK(Call(Kind::kRecv, f32, {}, {0}).text() == "recv(0 x float32)");
}

TEST_CASE("describe: the root's call and the others' read alike") {
  const DType i64 = DType::kInt64;
  const std::string broadcast = "broadcast(16 x int64, root 1)";
  CHECK(Call(Kind::kBroadcast, i64, {128}, {128}, 1).text() == broadcast);
  CHECK(Call(Kind::kBroadcast, i64, {}, {128}, 1).text() == broadcast);
  const std::string gather = "gather(16 x int64, root 1)";
  CHECK(Call(Kind::kGather, i64, {128}, {128, 128}, 1).text() == gather);
  CHECK(Call(Kind::kGather, i64, {128}, {}, 1).text() == gather);
  const std::string scatter = "scatter(16 x int64, root 1)";
  CHECK(Call(Kind::kScatter, i64, {128, 128}, {128}, 1).text() == scatter);
  CHECK(Call(Kind::kScatter, i64, {}, {128}, 1).text() == scatter);
}

TEST_CASE("payload_bytes: one block times the blocks it is one of") {
  const DType f32 = DType::kFloat32;
  CHECK(Call(Kind::kBarrier, f32, {}, {}).bytes() == 0);
  CHECK(Call(Kind::kBroadcast, f32, {}, {40}, 1).bytes() == 40);
  CHECK(Call(Kind::kAllReduce, f32, {40}, {40}).bytes() == 40);
  CHECK(Call(Kind::kReduce, f32, {40}, {}, 1).bytes() == 40);
  CHECK(Call(Kind::kAllGather, f32, {40}, {40, 40, 40}).bytes() == 120);
  CHECK(Call(Kind::kReduceScatter, f32, {40, 40, 40}, {40}).bytes() == 120);
  CHECK(Call(Kind::kAllToAll, f32, {40, 0, 4}, {40, 8, 8}).bytes() == 44);
}

TEST_CASE("payload_bytes: the root and the others come to the same") {
  const DType f32 = DType::kFloat32;
  CHECK(Call(Kind::kGather, f32, {40}, {40, 40}, 0).bytes() == 40);
  CHECK(Call(Kind::kGather, f32, {40}, {}, 0).bytes() == 40);
  CHECK(Call(Kind::kScatter, f32, {40, 40}, {40}, 0).bytes() == 40);
  CHECK(Call(Kind::kScatter, f32, {}, {40}, 0).bytes() == 40);
}
