// The calls as they show in profiles ("dreamcomm:" and the name) and in errors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace dreamcomm {

using c10d::OpType;
using Tensors = c10::ArrayRef<at::Tensor>;

/// How a call shows in profiles and errors.
struct Label {
  c10d::OpType type;
  const char* title;  // "dreamcomm:all_reduce"

  const char* name() const { return title + std::string_view("dreamcomm:").size(); }
};

inline constexpr Label kBroadcast{OpType::BROADCAST, "dreamcomm:broadcast"};
inline constexpr Label kAllReduce{OpType::ALLREDUCE, "dreamcomm:all_reduce"};
inline constexpr Label kAllReduceCoalesced{OpType::ALLREDUCE_COALESCED, "dreamcomm:all_reduce"};
inline constexpr Label kReduce{OpType::REDUCE, "dreamcomm:reduce"};
inline constexpr Label kAllGather{OpType::ALLGATHER, "dreamcomm:all_gather"};
inline constexpr Label kAllGatherBase{OpType::_ALLGATHER_BASE, "dreamcomm:all_gather"};
inline constexpr Label kAllGatherCoalesced{OpType::ALLGATHER_COALESCED, "dreamcomm:all_gather"};
inline constexpr Label kGather{OpType::GATHER, "dreamcomm:gather"};
inline constexpr Label kScatter{OpType::SCATTER, "dreamcomm:scatter"};
inline constexpr Label kReduceScatter{OpType::REDUCE_SCATTER, "dreamcomm:reduce_scatter"};
inline constexpr Label kReduceScatterBase{OpType::_REDUCE_SCATTER_BASE, "dreamcomm:reduce_scatter"};
inline constexpr Label kReduceScatterCoalesced{
    OpType::_REDUCE_SCATTER_BASE,  // torch 2.11 has no type for it
    "dreamcomm:reduce_scatter"};
inline constexpr Label kAllToAll{OpType::ALLTOALL, "dreamcomm:all_to_all"};
inline constexpr Label kAllToAllBase{OpType::ALLTOALL_BASE, "dreamcomm:all_to_all"};
inline constexpr Label kBarrier{OpType::BARRIER, "dreamcomm:barrier"};
inline constexpr Label kSend{OpType::SEND, "dreamcomm:send"};
inline constexpr Label kRecv{OpType::RECV, "dreamcomm:recv"};
inline constexpr Label kRecvAnySource{OpType::RECVANYSOURCE, "dreamcomm:recvAnySource"};

}  // namespace dreamcomm
