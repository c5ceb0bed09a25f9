#include "kernels/transfer/transfer.h"

namespace dreamcomm::kernels {
namespace {

bool is_fused(DType t) { return t == DType::kFloat32 || t == DType::kBFloat16; }

}  // namespace

void transfer(const Terms& terms, const std::byte* in, std::byte* out, float* residual,
              std::size_t count) {
  const bool fused = is_fused(terms.from) && is_fused(terms.to);
  (fused ? transfer_fused : transfer_staged)(terms, in, out, residual, count);
}

}  // namespace dreamcomm::kernels
