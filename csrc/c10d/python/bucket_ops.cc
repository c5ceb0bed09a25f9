#include "c10d/python/bucket_ops.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <functional>
#include <span>
#include <tuple>
#include <variant>
#include <vector>

#include "c10d/base/check_args.h"
#include "c10d/base/convert.h"
#include "c10d/base/current_device.h"
#include "gpu/bucket/launch.h"
#include "gpu/host/launch.h"
#include "kernels/bucket.h"

namespace dreamcomm {
namespace {

using at::Tensor;
using Tensors = c10::ArrayRef<Tensor>;

/// An argument as errors name it: "tensors[3]", or "out".
struct Argument {
  const char* call;
  const char* name;
  std::int64_t index = -1;
};

std::ostream& operator<<(std::ostream& out, const Argument& argument) {
  out << argument.call << ": expected '" << argument.name;
  return argument.index < 0 ? out << "'" : out << '[' << argument.index << "]'";
}

/// Contiguous elements of a packable type, of a CPU or a CUDA device. Tensors that are something
/// else inside (DTensor, FakeTensor, torch's zero tensors) have no memory to be read.
void require_flat(const Argument& argument, const Tensor& tensor) {
  const c10::DispatchKeySet keys = tensor.unsafeGetTensorImpl()->key_set();
  TORCH_CHECK_VALUE(!keys.has(c10::DispatchKey::Python), argument,
                    " to be a plain tensor, got one of a class with operations of its own; give "
                    "what it holds (of a DTensor: to_local())");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, argument,
                    " to be dense, got a tensor of layout ", tensor.layout(), "; use to_dense()");
  TORCH_CHECK_VALUE(tensor.device().is_cpu() || tensor.device().is_cuda(), argument,
                    " on cpu or cuda, got a tensor on ", tensor.device(),
                    "; no other device has these operations: move it with .cpu()");
  TORCH_CHECK_VALUE(is_packable(to_dtype(tensor.scalar_type())), argument,
                    " of type float32, float64, bfloat16 or float16, got ",
                    type_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(tensor.is_contiguous(), argument, " to be contiguous, got shape ",
                    tensor.sizes(), " with strides ", tensor.strides(),
                    "; give a contiguous() one");
  TORCH_CHECK_VALUE(!tensor.is_neg(), argument,
                    " to hold its own numbers, got a view that negates them; resolve_neg() it");
  TORCH_CHECK_VALUE(!tensor._is_zerotensor(), argument,
                    " to have memory, got a tensor of zeros without any; clone() it first");
  TORCH_CHECK_VALUE(tensor.numel() == 0 || tensor.const_data_ptr() != nullptr, argument,
                    " to have memory, got a tensor whose storage was given back");
}

void require_beside(const Argument& argument, const Tensor& tensor, const char* flat_name,
                    const Tensor& flat) {
  TORCH_CHECK_VALUE(tensor.device() == flat.device(), argument, " on ", flat.device(), " like '",
                    flat_name, "', got a tensor on ", tensor.device());
}

/// Every tensor flat, of one type, and `flat` with as many elements as all together.
void require_fitting(const char* call, Tensors tensors, const char* flat_name, const Tensor& flat) {
  require_flat({call, flat_name}, flat);
  std::int64_t numel = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Argument argument{call, "tensors", static_cast<std::int64_t>(i)};
    require_flat(argument, tensors[i]);
    require_beside(argument, tensors[i], flat_name, flat);
    TORCH_CHECK_VALUE(tensors[i].scalar_type() == tensors[0].scalar_type(), argument, " of type ",
                      type_name(tensors[0].scalar_type()), " like the first tensor, got ",
                      type_name(tensors[i].scalar_type()), "; give each type a call of its own");
    numel += tensors[i].numel();
  }
  TORCH_CHECK_VALUE(flat.numel() == numel, Argument({call, flat_name}), " with ", numel,
                    " elements, as many as the tensors have together, got ", flat.numel());
}

/// No tensor shares memory with `flat`, except one of the same type at its own place.
void require_apart(const char* call, Tensors tensors, const char* flat_name, const Tensor& flat) {
  const auto* place = static_cast<const std::byte*>(flat.const_data_ptr());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const bool in_place =
        tensors[i].scalar_type() == flat.scalar_type() && tensors[i].const_data_ptr() == place;
    TORCH_CHECK_VALUE(in_place || !overlap(tensors[i], flat),
                      Argument({call, "tensors", static_cast<std::int64_t>(i)}),
                      " not to share memory with '", flat_name,
                      "', except at its own place in it with the same type; clone() it first");
    place += tensors[i].numel() * static_cast<std::int64_t>(flat.itemsize());
  }
}

void require_residual(Tensors tensors, const Tensor& out, const Tensor& residual) {
  const Argument argument{"pack", "residual"};
  require_flat(argument, residual);
  require_beside(argument, residual, "out", out);
  TORCH_CHECK_VALUE(residual.scalar_type() == at::kFloat, argument, " of type float32, got ",
                    type_name(residual.scalar_type()));
  TORCH_CHECK_VALUE(residual.numel() == out.numel(), argument, " with ", out.numel(),
                    " elements like 'out', got ", residual.numel());
  TORCH_CHECK_VALUE(!overlap(residual, out), argument, " not to share memory with 'out'");
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(!overlap(residual, tensor), argument,
                      " not to share memory with one of 'tensors'");
  }
}

/// Reports to autograd that the memory has changed, as operations in place do.
void mark_written(const Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

DType type_of(Tensors tensors, const Tensor& flat) {
  return to_dtype(tensors.empty() ? flat.scalar_type() : tensors[0].scalar_type());
}

/// Calls `start` with the caller's stream of the device.
template <typename Start>
Moved on_device(c10::Device device, const Start& start) {
  const CurrentDevice here(device);
  try {
    return start(here.stream());
  } catch (const Error&) {
    std::rethrow_exception(current_as_torch());
  }
}

/// A graph would copy again from memory of the host that has been given to others. The returned
/// stage keeps `kept`: torch does not reuse its memory before the stream has reached that point.
gpu::Stage stage_on(c10::Device device, void* stream, Tensor& kept) {
  if (gpu::is_capturing(stream)) return {};
  return [device, &kept](std::span<const std::byte> bytes) -> const void* {
    const auto size = static_cast<std::int64_t>(bytes.size());
    const auto options = at::TensorOptions(at::kByte);
    const Tensor pinned = at::empty({size}, options.pinned_memory(true));
    std::memcpy(pinned.mutable_data_ptr(), bytes.data(), bytes.size());
    kept = at::empty({size}, options.device(device));
    kept.copy_(pinned, /*non_blocking=*/true);
    return kept.const_data_ptr();
  };
}

Moved pack_on_device(const PackJob& job, c10::Device device) {
  return on_device(device, [&](void* stream) {
    Tensor table;
    return gpu::pack(job, stream, stage_on(device, stream, table));
  });
}

std::tuple<std::uint64_t, std::uint64_t> pack_tensors(const std::vector<Tensor>& tensors,
                                                      const Tensor& out, double scale,
                                                      const std::optional<Tensor>& residual) {
  require_fitting("pack", tensors, "out", out);
  require_apart("pack", tensors, "out", out);
  if (residual) require_residual(tensors, out, *residual);
  std::vector<Source> sources;
  sources.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    sources.push_back({static_cast<const std::byte*>(tensor.const_data_ptr()),
                       static_cast<std::size_t>(tensor.numel())});
  }
  const PackJob job{.tensors = sources,
                    .out = static_cast<std::byte*>(out.data_ptr()),
                    .from = type_of(tensors, out),
                    .to = to_dtype(out.scalar_type()),
                    .scale = scale,
                    .residual = residual ? residual->data_ptr<float>() : nullptr};
  const Moved moved = out.is_cpu() ? pack(job) : pack_on_device(job, out.device());
  mark_written(out);
  if (residual) mark_written(*residual);
  return {moved.read, moved.written};
}

/// The result of a pass: numbers, or on a device tensors of no dimension, since to read
/// those takes as long as all that is before them in the stream.
using Found = std::variant<double, bool, Tensor>;

struct Result {
  Moved moved;
  Found squares;
  Found finite;
};

Result unpack_on_device(const UnpackJob& job, std::int64_t count, c10::Device device) {
  const auto start = [&](const gpu::Inspection& inspection) {
    return on_device(device, [&](void* stream) {
      Tensor table;
      return gpu::unpack(job, inspection, stream, stage_on(device, stream, table));
    });
  };
  if (!job.inspect) return {start({}), 0.0, true};
  const auto doubles = at::TensorOptions(at::kDouble).device(device);
  const auto partials =
      static_cast<std::int64_t>(gpu::partials_of(static_cast<std::size_t>(count)));
  const Tensor sums = at::empty({partials}, doubles);
  const Tensor squares = at::empty({}, doubles);
  const Tensor finite = at::empty({}, doubles.dtype(at::kBool));
  const Moved moved =
      start({sums.data_ptr<double>(), squares.data_ptr<double>(), finite.data_ptr<bool>()});
  return {moved, squares, finite};
}

Result unpack_on_host(const UnpackJob& job) {
  const Unpacked done = unpack(job);
  return {done.moved, done.squares, done.finite};
}

std::tuple<std::uint64_t, std::uint64_t, Found, Found> unpack_tensors(
    const Tensor& buffer, const std::vector<Tensor>& tensors, int divisor, double factor,
    bool inspect) {
  require_fitting("unpack", tensors, "buffer", buffer);
  require_apart("unpack", tensors, "buffer", buffer);
  TORCH_CHECK_VALUE(!any_overlap(tensors),
                    "unpack: expected 'tensors' not to share memory with each other");
  TORCH_CHECK_VALUE(divisor >= 1, "unpack: expected 'divisor' to be at least 1, got ", divisor);
  std::vector<Target> targets;
  targets.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    targets.push_back(
        {static_cast<std::byte*>(tensor.data_ptr()), static_cast<std::size_t>(tensor.numel())});
  }
  const UnpackJob job{.in = static_cast<const std::byte*>(buffer.const_data_ptr()),
                      .tensors = targets,
                      .from = to_dtype(buffer.scalar_type()),
                      .to = type_of(tensors, buffer),
                      .divisor = divisor,
                      .factor = factor,
                      .inspect = inspect};
  const Result result = buffer.is_cpu() ? unpack_on_host(job)
                                        : unpack_on_device(job, buffer.numel(), buffer.device());
  for (const Tensor& tensor : tensors) mark_written(tensor);
  return {result.moved.read, result.moved.written, result.squares, result.finite};
}

}  // namespace

void bind_ops(pybind11::module_& m) {
  m.def("pack", &pack_tensors, py::arg("tensors"), py::arg("out"), py::arg("scale"),
        py::arg("residual"), py::call_guard<py::gil_scoped_release>());
  m.def("unpack", &unpack_tensors, py::arg("buffer"), py::arg("tensors"), py::arg("divisor"),
        py::arg("factor"), py::arg("inspect"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace dreamcomm
