// The calls as they show in profiles ("dreamcomm:" and the name) and in errors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "core/record.h"  // first: the labels below would shadow its enumerators

namespace dreamcomm {

using c10d::OpType;
using Tensors = c10::ArrayRef<at::Tensor>;

/// How a call shows in profiles and errors.
struct OpLabel {
  c10d::OpType type;
  const char* title;  // "dreamcomm:all_reduce"

  const char* name() const { return title + std::string_view("dreamcomm:").size(); }
};

inline constexpr OpLabel kBroadcast{OpType::BROADCAST, "dreamcomm:broadcast"};
inline constexpr OpLabel kAllReduce{OpType::ALLREDUCE, "dreamcomm:all_reduce"};
inline constexpr OpLabel kAllReduceCoalesced{OpType::ALLREDUCE_COALESCED, "dreamcomm:all_reduce"};
inline constexpr OpLabel kReduce{OpType::REDUCE, "dreamcomm:reduce"};
inline constexpr OpLabel kAllGather{OpType::ALLGATHER, "dreamcomm:all_gather"};
inline constexpr OpLabel kAllGatherBase{OpType::_ALLGATHER_BASE, "dreamcomm:all_gather"};
inline constexpr OpLabel kAllGatherCoalesced{OpType::ALLGATHER_COALESCED, "dreamcomm:all_gather"};
inline constexpr OpLabel kGather{OpType::GATHER, "dreamcomm:gather"};
inline constexpr OpLabel kScatter{OpType::SCATTER, "dreamcomm:scatter"};
inline constexpr OpLabel kReduceScatter{OpType::REDUCE_SCATTER, "dreamcomm:reduce_scatter"};
inline constexpr OpLabel kReduceScatterBase{OpType::_REDUCE_SCATTER_BASE,
                                            "dreamcomm:reduce_scatter"};
inline constexpr OpLabel kReduceScatterCoalesced{
    OpType::_REDUCE_SCATTER_BASE,  // torch 2.11 has no type for it
    "dreamcomm:reduce_scatter"};
inline constexpr OpLabel kAllToAll{OpType::ALLTOALL, "dreamcomm:all_to_all"};
inline constexpr OpLabel kAllToAllBase{OpType::ALLTOALL_BASE, "dreamcomm:all_to_all"};
inline constexpr OpLabel kBarrier{OpType::BARRIER, "dreamcomm:barrier"};
inline constexpr OpLabel kShardedStep{OpType::ALLREDUCE_COALESCED, "dreamcomm:sharded_step"};
inline constexpr OpLabel kShardedReduce{OpType::_REDUCE_SCATTER_BASE, "dreamcomm:sharded_reduce"};
inline constexpr OpLabel kShardedWrite{OpType::ALLGATHER_COALESCED, "dreamcomm:sharded_write"};
inline constexpr OpLabel kSend{OpType::SEND, "dreamcomm:send"};
inline constexpr OpLabel kRecv{OpType::RECV, "dreamcomm:recv"};
inline constexpr OpLabel kRecvAnySource{OpType::RECVANYSOURCE, "dreamcomm:recvAnySource"};

}  // namespace dreamcomm
