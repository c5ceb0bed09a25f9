#include "memory.h"

#include <ATen/native/TensorFactories.h>
#include <ATen/ops/add.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>
#include <string>
#include <vector>

namespace dreamcomm::testing {
namespace {

struct Memory {
  std::vector<std::byte> bytes;
  Queue* owner;
  std::vector<Queue*> users;
};

void let_go(void* context) {
  auto* memory = static_cast<Memory*>(context);
  for (Queue* user : memory->users) {
    Mark mark;
    mark.record(*user);
    mark.block(*memory->owner);
  }
  memory->owner->put([memory] {
    std::memset(memory->bytes.data(), 0xDD, memory->bytes.size());
    delete memory;
  });
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat>) {
  const c10::OptionalDeviceGuard on(device);
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d];
  }
  return empty_on_device(sizes, strides, type.value_or(at::kFloat));
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard on(device);
  return empty_on_device(sizes, strides, type.value_or(at::kFloat));
}

/// The current stream of a device.
Queue& queue_on(const at::Device& device) {
  const c10::DeviceGuard on(device);
  return queue_of(current_stream());
}

/// One queue waits for what another one has been given so far.
void order(Queue& first, Queue& then) {
  Mark mark;
  mark.record(first);
  mark.block(then);
}

/// Copies on the current stream of the target's device, or the source's; a copy to the host waits
/// for it. Between devices the streams of both wait for each other, as CUDA's do.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  Queue& queue = queue_on(to.is_cpu() ? from.device() : to.device());
  if (!from.is_cpu() && !to.is_cpu() && from.device() != to.device()) {
    Queue& source = queue_on(from.device());
    order(source, queue);
    queue.put([to = on_host(to), source = on_host(from)] { to.copy_(source); });
    order(queue, source);
    return to;
  }
  if (from.is_cpu()) {  // the host's tensor may change as soon as this returns
    queue.put([to = on_host(to), source = from.clone()] { to.copy_(source); });
  } else {
    queue.put([to = on_host(to), source = on_host(from)] { to.copy_(source); });
  }
  if (to.is_cpu()) queue.wait();
  return to;
}

at::Tensor view(const at::Tensor& tensor, c10::IntArrayRef sizes) {
  return at::native::view(tensor, sizes);
}

at::Tensor as_strided(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, sizes, strides, offset);
}

/// Runs the host's operation, on the current stream of the result's device.
template <typename Operation>
void put(const at::Tensor& result, const Operation& operation) {
  queue_on(result.device()).put(operation);
}

at::Tensor& add(const at::Tensor& a, const at::Tensor& b, const at::Scalar& by, at::Tensor& out) {
  put(out, [out = on_host(out), a = on_host(a), b = on_host(b), by]() mutable {
    at::add_out(out, a, b, by);
  });
  return out;
}

at::Tensor& mul(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  put(out,
      [out = on_host(out), a = on_host(a), b = on_host(b)]() mutable { at::mul_out(out, a, b); });
  return out;
}

at::Tensor& minimum(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  put(out, [out = on_host(out), a = on_host(a), b = on_host(b)]() mutable {
    at::minimum_out(out, a, b);
  });
  return out;
}

at::Tensor& maximum(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  put(out, [out = on_host(out), a = on_host(a), b = on_host(b)]() mutable {
    at::maximum_out(out, a, b);
  });
  return out;
}

at::Tensor& div(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  put(out,
      [out = on_host(out), a = on_host(a), b = on_host(b)]() mutable { at::div_out(out, a, b); });
  return out;
}

at::Tensor& div_rounded(const at::Tensor& a, const at::Tensor& b,
                        std::optional<c10::string_view> rounding, at::Tensor& out) {
  put(out,
      [out = on_host(out), a = on_host(a), b = on_host(b),
       rounding = std::string(rounding.value())]() mutable { at::div_out(out, a, b, rounding); });
  return out;
}

at::Tensor cat(const at::ITensorListRef& tensors, int64_t dim) {
  std::vector<at::Tensor> parts;
  std::vector<at::Tensor> shapes;
  for (const at::Tensor& part : tensors) {
    parts.push_back(on_host(part));
    shapes.push_back(
        at::empty(part.sizes(), at::TensorOptions(part.scalar_type()).device(at::kMeta)));
  }
  const at::Tensor shape = at::cat(shapes, dim);
  const c10::DeviceGuard on(tensors.front().device());
  at::Tensor out = empty_on_device(shape.sizes(), shape.strides(), shape.scalar_type());
  put(out, [out = on_host(out), parts, dim]() mutable { at::cat_out(out, parts, dim); });
  return out;
}

at::Tensor& fill(at::Tensor& tensor, const at::Scalar& number) {
  put(tensor, [tensor = on_host(tensor), number] { tensor.fill_(number); });
  return tensor;
}

at::Tensor& zero(at::Tensor& tensor) { return fill(tensor, 0); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("add.out", &add);
  m.impl("mul.out", &mul);
  m.impl("minimum.out", &minimum);
  m.impl("maximum.out", &maximum);
  m.impl("div.out", &div);
  m.impl("div.out_mode", &div_rounded);
  m.impl("cat", &cat);
  m.impl("fill_.Scalar", &fill);
  m.impl("zero_", &zero);
}

}  // namespace

at::Tensor empty_on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type) {
  std::size_t last = 1;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    last = sizes[d] == 0 ? 0
           : last == 0   ? 0
                         : last + static_cast<std::size_t>((sizes[d] - 1) * strides[d]);
  }
  const std::size_t bytes = last * c10::elementSize(type);
  const c10::Stream stream = current_stream();
  auto* memory = new Memory{std::vector<std::byte>(bytes), &queue_of(stream), {}};
  c10::DataPtr data(memory->bytes.data(), memory, &let_go, stream.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), nullptr, false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

void use_memory_on(const c10::DataPtr& data, Queue& queue) {
  if (data.get_deleter() != &let_go) return;
  static_cast<Memory*>(data.get_context())->users.push_back(&queue);
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.scalar_type()));
}

}  // namespace dreamcomm::testing
