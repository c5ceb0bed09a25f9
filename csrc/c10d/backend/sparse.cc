// all_reduce of sparse tensors: Gloo's, after the ranks have compared their calls here.
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>

#include "c10d/backend/backend.h"
#include "c10d/base/convert.h"
#include "c10d/base/op_labels.h"
#include "core/error.h"

namespace dreamcomm {
namespace {

constexpr int64_t kRoom = 256;  // bytes of a tensor's description

std::string described(const at::Tensor& tensor) {
  return c10::str(type_name(tensor.scalar_type()), " of shape ", tensor.sizes(), " in the layout ",
                  tensor.layout());
}

std::string text_of(const at::Tensor& row) {
  const char* const first = static_cast<const char*>(row.const_data_ptr());
  return {first, std::find(first, first + kRoom, '\0')};
}

}  // namespace

/// Compares what the ranks call. Gloo would wait until its timeout for a rank that makes another
/// call, is late or dead, and would not name it; here the error does, as in any call.
void DreamBackend::agree_on_sparse(const Tensor& tensor, const c10d::AllreduceOptions& opts) {
  const Site site = at(kAllReduce);
  Reduction reduction = to_reduction(opts.reduceOp, tensor.scalar_type(), site);
  reduction.dtype = DType::kOpaque;
  const std::string own = described(tensor).substr(0, kRoom - 1);
  const Tensor mine = at::zeros({kRoom}, at::kByte);
  std::copy(own.begin(), own.end(), static_cast<char*>(mine.mutable_data_ptr()));
  const Tensor all = at::zeros({getSize(), kRoom}, at::kByte);
  Calls calls;
  Call& call = calls.emplace_back(Kind::kAllGather, reduction);
  call.input(mine);
  for (int rank = 0; rank < getSize(); ++rank) call.output(all[rank]);
  issue({kAllReduce, {}, {}, opts.timeout, false}, calls);
  for (int rank = 0; rank < getSize(); ++rank) {
    const std::string their = text_of(all[rank]);
    TORCH_CHECK_WITH(DistBackendError, their == own, "the ranks made different calls: rank ", rank_,
                     " called all_reduce of a sparse tensor, ", own, ", rank ", rank, " of one, ",
                     their, ". No data was moved; the group stays usable");
  }
}

WorkPtr DreamBackend::reduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  const Tensor& tensor = only(at(kAllReduce), "tensors", tensors);
  if (cpu_ && tensor.device().is_cpu() && !coalescing()) agree_on_sparse(tensor, opts);
  return forward(tensor, [&](c10d::Backend& inner) { return inner.allreduce(tensors, opts); });
}

}  // namespace dreamcomm
