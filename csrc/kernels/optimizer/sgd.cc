// SGD, operation by operation as torch's single-tensor form has it:
//   gradient += weight_decay * parameter                    add, fused
//   buffer *= momentum                                      mul_
//   buffer += (1 - dampening) * gradient                    add_, fused
//   gradient += momentum * buffer, or gradient = buffer     add, fused
//   parameter += -lr * gradient                             add_, fused
#include "kernels/formats.h"
#include "kernels/optimizer/steps.h"

namespace dreamcomm::kernels {
namespace {

enum class Momentum { kNone, kFirst, kRunning };

template <typename T>
struct Rows {
  explicit Rows(const StepRows& rows)
      : parameter(reinterpret_cast<T*>(rows.memory.parameter)),
        buffer(reinterpret_cast<T*>(rows.memory.state[0])),
        gradient(reinterpret_cast<const T*>(rows.gradient)) {}

  T* parameter;
  T* buffer;
  const T* gradient;
};

template <typename T>
class Sgd {
 public:
  explicit Sgd(const SgdRule& rule)
      : sign_(rule.maximize ? -1 : 1),
        penalized_(rule.weight_decay != 0),
        weight_decay_(static_cast<T>(rule.weight_decay)),
        momentum_(static_cast<T>(rule.momentum)),
        weight_(static_cast<T>(1 - rule.dampening)),
        nesterov_(rule.nesterov),
        step_(static_cast<T>(-rule.lr)) {}

  template <Momentum kMomentum>
  void update(const Rows<T>& rows, std::size_t i) const {
    const T given = rows.gradient[i] * sign_;
    T gradient = penalized_ ? fuse(weight_decay_, rows.parameter[i], given) : given;
    if constexpr (kMomentum != Momentum::kNone) {
      T buffer = gradient;
      if constexpr (kMomentum == Momentum::kRunning) {
        buffer = fuse(weight_, gradient, rows.buffer[i] * momentum_);
      }
      rows.buffer[i] = Real<T>::write(buffer);
      gradient = nesterov_ ? fuse(momentum_, buffer, gradient) : buffer;
    }
    rows.parameter[i] = Real<T>::write(fuse(step_, gradient, rows.parameter[i]));
  }

 private:
  T sign_;
  bool penalized_;
  T weight_decay_;
  T momentum_;
  T weight_;
  bool nesterov_;
  T step_;
};

template <typename T, Momentum kMomentum>
void step(Vectors level, const SgdRule& rule, const StepRows& given) {
  const Sgd<T> sgd(rule);
  const Rows<T> rows(given);
  const std::size_t count = given.count;
  run_fused(level, [sgd, rows, count] {
  // Rows do not overlap, and only iteration i reads or writes element i.
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) sgd.template update<kMomentum>(rows, i);
  });
}

template <typename T>
void step(Vectors level, const SgdRule& rule, const StepRows& rows) {
  if (rule.momentum == 0) return step<T, Momentum::kNone>(level, rule, rows);
  if (rule.first) return step<T, Momentum::kFirst>(level, rule, rows);
  step<T, Momentum::kRunning>(level, rule, rows);
}

}  // namespace

void sgd_step(Vectors level, const SgdRule& rule, DType type, const StepRows& rows) {
  if (type == DType::kFloat32) return step<float>(level, rule, rows);
  step<double>(level, rule, rows);
}

}  // namespace dreamcomm::kernels
