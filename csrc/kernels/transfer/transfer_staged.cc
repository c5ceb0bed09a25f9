#include <algorithm>
#include <array>

#include "kernels/formats.h"
#include "kernels/steps.h"
#include "kernels/widen.h"

namespace dreamcomm::kernels {
namespace {

constexpr std::size_t kBlock = 512;  // elements; all arrays of a block fit into L1

template <typename A>
using Block = std::array<A, kBlock>;

/// value[i] = value[i] * scale + residual[i].
template <typename A>
void add_residual(A scale, A* value, const float* residual, std::size_t count) {
  run_simd([=] {
    for (std::size_t i = 0; i < count; ++i) {
      value[i] = Real<A>::write(value[i] * scale + residual[i]);
    }
  });
}

template <typename A>
void keep_left_over(const A* value, const A* sent, float* residual, std::size_t count) {
  run_simd([=] {
    for (std::size_t i = 0; i < count; ++i) residual[i] = left_over(value[i], sent[i]);
  });
}

template <typename A>
void transfer_block(const Terms& terms, const std::byte* in, std::byte* out, float* residual,
                    std::size_t count) {
  alignas(64) Block<A> value;
  widen(terms.from, in, value.data(), count);
  if (residual == nullptr) {
    with_step<A>(terms, [&](const auto& step) {
      apply<Real<A>, Real<A>>(step, value.data(), value.data(), count);
    });
    return narrow(terms.to, value.data(), out, count);
  }
  alignas(64) Block<A> sent;
  add_residual(static_cast<A>(terms.scale), value.data(), residual, count);
  narrow(terms.to, value.data(), out, count);
  widen(terms.to, out, sent.data(), count);
  keep_left_over(value.data(), sent.data(), residual, count);
}

template <typename A>
void transfer_with(const Terms& terms, const std::byte* in, std::byte* out, float* residual,
                   std::size_t count) {
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t n = std::min(kBlock, count - begin);
    transfer_block<A>(terms, in + begin * item_size(terms.from), out + begin * item_size(terms.to),
                      residual == nullptr ? nullptr : residual + begin, n);
  }
}

}  // namespace

void transfer_staged(const Terms& terms, const std::byte* in, std::byte* out, float* residual,
                     std::size_t count) {
  if (terms.from == DType::kFloat64 || terms.to == DType::kFloat64) {
    return transfer_with<double>(terms, in, out, residual, count);
  }
  transfer_with<float>(terms, in, out, residual, count);
}

}  // namespace dreamcomm::kernels
