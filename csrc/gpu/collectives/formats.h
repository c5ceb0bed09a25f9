// Elements as kernels of a GPU read and write them: the numbers of kernels/formats.h,
// by the GPU's own conversions where it has them. The bits are the same.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/types.h"
#include "kernels/formats.h"

namespace dreamcomm::gpu {

#if defined(__CUDACC__)

struct Float16 : kernels::Arithmetic<float> {
  using Element = std::uint16_t;
  using Accumulator = float;
  __device__ __forceinline__ static float read(Element element) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(element));
    return value;
  }
  __device__ __forceinline__ static Element write(float value) {
    Element element;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(element) : "f"(value));
    return value != value ? Element{0x7e00} : element;
  }
};

struct BFloat16 : kernels::Arithmetic<float> {
  using Element = std::uint16_t;
  using Accumulator = float;
  __device__ __forceinline__ static float read(Element element) {
    return __uint_as_float(std::uint32_t{element} << 16U);
  }
  __device__ __forceinline__ static Element write(float value) {
    Element element;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(element) : "f"(value));
    return value != value ? Element{0x7fc0} : element;
  }
};

#else

using kernels::BFloat16;
using kernels::Float16;

#endif

/// Calls `use` with the format of the type; false if GPUs do not compute with it.
template <typename Use>
bool with_format(DType type, const Use& use) {
  using kernels::Integer;
  using kernels::Real;
  switch (type) {
    case DType::kFloat32:
      return use(std::type_identity<Real<float>>()), true;
    case DType::kFloat64:
      return use(std::type_identity<Real<double>>()), true;
    case DType::kFloat16:
      return use(std::type_identity<Float16>()), true;
    case DType::kBFloat16:
      return use(std::type_identity<BFloat16>()), true;
    case DType::kUInt8:
      return use(std::type_identity<Integer<std::uint8_t>>()), true;
    case DType::kInt8:
      return use(std::type_identity<Integer<std::int8_t>>()), true;
    case DType::kInt16:
      return use(std::type_identity<Integer<std::int16_t>>()), true;
    case DType::kInt32:
      return use(std::type_identity<Integer<std::int32_t>>()), true;
    case DType::kInt64:
      return use(std::type_identity<Integer<std::int64_t>>()), true;
    default:
      return false;
  }
}

}  // namespace dreamcomm::gpu
