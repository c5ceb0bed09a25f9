#include "kernels/formats.h"
#include "kernels/steps.h"

namespace dreamcomm::kernels {
namespace {

/// As apply(), with error feedback.
template <typename From, typename To>
void apply_with_feedback(float scale, const typename From::Element* in, typename To::Element* out,
                         float* residual, std::size_t count) {
  run_simd([=] {
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
      const float value = From::read(in[i]) * scale + residual[i];
      const typename To::Element sent = To::write(value);
      out[i] = sent;
      residual[i] = left_over(value, To::read(sent));
    }
  });
}

template <typename From, typename To>
void transfer_as(const Terms& terms, const std::byte* in, std::byte* out, float* residual,
                 std::size_t count) {
  const auto* x = reinterpret_cast<const typename From::Element*>(in);
  auto* result = reinterpret_cast<typename To::Element*>(out);
  if (residual != nullptr) {
    const auto scale = static_cast<float>(terms.scale);
    return apply_with_feedback<From, To>(scale, x, result, residual, count);
  }
  with_step<float>(terms, [&](const auto& step) { apply<From, To>(step, x, result, count); });
}

template <typename From>
void transfer_from(const Terms& terms, const std::byte* in, std::byte* out, float* residual,
                   std::size_t count) {
  if (terms.to == DType::kBFloat16) {
    return transfer_as<From, BFloat16>(terms, in, out, residual, count);
  }
  transfer_as<From, Real<float>>(terms, in, out, residual, count);
}

}  // namespace

void transfer_fused(const Terms& terms, const std::byte* in, std::byte* out, float* residual,
                    std::size_t count) {
  if (terms.from == DType::kBFloat16) {
    return transfer_from<BFloat16>(terms, in, out, residual, count);
  }
  transfer_from<Real<float>>(terms, in, out, residual, count);
}

}  // namespace dreamcomm::kernels
