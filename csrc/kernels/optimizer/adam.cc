// Adam and AdamW, operation by operation as torch's single-tensor form has them:
//   parameter *= decay                                           mul_
//   gradient += weight_decay * parameter                         add, fused
//   exp_avg += lerp_weight * (gradient - exp_avg)                lerp_, fused
//   exp_avg_sq *= beta2                                          mul_
//   exp_avg_sq += (square_weight * gradient) * gradient          addcmul_, fused
//   denominator = sqrt(exp_avg_sq) / bias_correction2_sqrt + eps
//   parameter += (-step_size * exp_avg) / denominator            addcdiv_
#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/formats.h"
#include "kernels/optimizer/steps.h"

namespace dreamcomm::kernels {
namespace {

template <typename T>
struct Rows {
  explicit Rows(const StepRows& rows)
      : parameter(reinterpret_cast<T*>(rows.memory.parameter)),
        average(reinterpret_cast<T*>(rows.memory.state[0])),
        square(reinterpret_cast<T*>(rows.memory.state[1])),
        largest(reinterpret_cast<T*>(rows.memory.state[2])),
        gradient(reinterpret_cast<const T*>(rows.gradient)) {}

  void advance(std::size_t count) {
    parameter += count;
    average += count;
    square += count;
    if (largest != nullptr) largest += count;
    gradient += count;
  }

  T* parameter;
  T* average;
  T* square;
  T* largest;
  const T* gradient;
};

/// The moments of one element that its parameter depends on.
template <typename T>
struct Moments {
  T average;
  T square;  // the largest one yet, with amsgrad
};

/// The case that a loop is compiled for.
struct Form {
  bool amsgrad;
  bool penalized;  // with weight decay that is not decoupled
  bool near;       // the average is nearer to what it was than to the gradient
};

template <typename T>
bool is_near(const AdamRule& rule) {
  return std::abs(static_cast<T>(rule.lerp_weight)) < T{0.5};
}

template <typename T>
class Adam {
 public:
  explicit Adam(const AdamRule& rule)
      : sign_(rule.maximize ? -1 : 1),
        weight_decay_(static_cast<T>(rule.weight_decay)),
        decay_(static_cast<T>(rule.decay)),
        lerp_(static_cast<T>(rule.lerp_weight) - (is_near<T>(rule) ? T{0} : T{1})),
        beta2_(static_cast<T>(rule.beta2)),
        square_weight_(static_cast<T>(rule.square_weight)),
        correction_(static_cast<T>(rule.bias_correction2_sqrt)),
        eps_(static_cast<T>(rule.eps)),
        step_(static_cast<T>(-rule.step_size)) {}

  /// Updates the state of element i.
  template <Form kForm>
  Moments<T> update(const Rows<T>& rows, std::size_t i) const {
    T gradient = rows.gradient[i] * sign_;
    if constexpr (kForm.penalized) {
      gradient = fuse(weight_decay_, rows.parameter[i] * decay_, gradient);
    }
    const T before = rows.average[i];
    // From the nearer end, as torch's lerp.
    const T average = fuse(lerp_, gradient - before, kForm.near ? before : gradient);
    T square = fuse(square_weight_ * gradient, gradient, rows.square[i] * beta2_);
    rows.average[i] = Real<T>::write(average);
    rows.square[i] = Real<T>::write(square);
    if constexpr (kForm.amsgrad) {
      const T largest = rows.largest[i];
      const T larger = largest > square ? largest : square;
      square = largest != largest ? largest : larger;
      rows.largest[i] = Real<T>::write(square);
    }
    return {average, square};
  }

  /// Updates the parameter of element i. `root`: of the square.
  void descend(const Rows<T>& rows, std::size_t i, T average, T root) const {
    const T denominator = root / correction_ + eps_;
    rows.parameter[i] = Real<T>::write(rows.parameter[i] * decay_ + step_ * average / denominator);
  }

 private:
  T sign_;
  T weight_decay_;
  T decay_;
  T lerp_;
  T beta2_;
  T square_weight_;
  T correction_;
  T eps_;
  T step_;
};

// An element of a row is read before it is written, only by the same iteration, and rows do not
// overlap. `ivdep` says so to the compiler.

template <typename T, Form kForm>
void step_at_once(Vectors level, const Adam<T>& adam, const Rows<T>& rows, std::size_t count) {
  run_fused(level, [adam, rows, count] {
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
      const Moments<T> moments = adam.template update<kForm>(rows, i);
      adam.descend(rows, i, moments.average, std::sqrt(moments.square));
    }
  });
}

/// Updates the state and leaves the squares in `tile`. Those that are 0 are 1 there: MKL takes ten
/// times as long for the root of 0, and gradients that are always 0 are common.
template <typename T, Form kForm>
void update_all(Vectors level, const Adam<T>& adam, const Rows<T>& rows, T* tile,
                std::size_t count) {
  run_fused(level, [adam, rows, tile, count] {
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
      const T square = adam.template update<kForm>(rows, i).square;
      tile[i] = square == 0 ? T{1} : square;
    }
  });
}

template <typename T, bool kAmsgrad>
void descend_all(Vectors level, const Adam<T>& adam, const Rows<T>& rows, const T* roots,
                 std::size_t count) {
  run_fused(level, [adam, rows, roots, count] {
    const T* const squares = kAmsgrad ? rows.largest : rows.square;
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
      adam.descend(rows, i, rows.average[i], squares[i] == 0 ? T{0} : roots[i]);
    }
  });
}

/// With square roots from elsewhere. A tile of each row lies in the L2 cache meanwhile: smaller
/// tiles cost more calls, and more waits for memory where a row's next tile begins.
template <typename T, Form kForm>
void step_by_tiles(Vectors level, const Adam<T>& adam, Rows<T> rows, std::size_t count,
                   SquareRoots roots) {
  constexpr std::size_t kTile = 65536 / sizeof(T);
  constexpr DType kType = sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;
  alignas(64) std::array<T, kTile> tile;
  while (count > 0) {
    const std::size_t n = std::min(kTile, count);
    update_all<T, kForm>(level, adam, rows, tile.data(), n);
    roots(kType, reinterpret_cast<std::byte*>(tile.data()), n);
    descend_all<T, kForm.amsgrad>(level, adam, rows, tile.data(), n);
    rows.advance(n);
    count -= n;
  }
}

template <typename T, Form kForm>
void step(Vectors level, const AdamRule& rule, const StepRows& given) {
  const Adam<T> adam(rule);
  const Rows<T> rows(given);
  if (rule.roots == nullptr) return step_at_once<T, kForm>(level, adam, rows, given.count);
  step_by_tiles<T, kForm>(level, adam, rows, given.count, rule.roots);
}

template <typename T, bool kAmsgrad, bool kPenalized>
void step(Vectors level, const AdamRule& rule, const StepRows& rows) {
  if (is_near<T>(rule)) return step<T, Form{kAmsgrad, kPenalized, true}>(level, rule, rows);
  step<T, Form{kAmsgrad, kPenalized, false}>(level, rule, rows);
}

template <typename T>
void step(Vectors level, const AdamRule& rule, const StepRows& rows) {
  const bool penalized = rule.weight_decay != 0;
  if (rule.amsgrad && penalized) return step<T, true, true>(level, rule, rows);
  if (rule.amsgrad) return step<T, true, false>(level, rule, rows);
  if (penalized) return step<T, false, true>(level, rule, rows);
  step<T, false, false>(level, rule, rows);
}

}  // namespace

void adam_step(Vectors level, const AdamRule& rule, DType type, const StepRows& rows) {
  if (type == DType::kFloat32) return step<float>(level, rule, rows);
  step<double>(level, rule, rows);
}

}  // namespace dreamcomm::kernels
