// The Python module dreamcomm_test_device.
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>

#include "c10d/device/device_group.h"
#include "cpp/support/host_driver.h"
#include "engine.h"
#include "memory.h"
#include "streams.h"

namespace dreamcomm::testing {
namespace {

/// The tests' driver of GPU kernels, whose kernels run in the order of streams.
class StreamDriver final : public gpu::Driver {
 public:
  explicit StreamDriver(int device) : host_(make_host_driver(device, 8)) {}

  gpu::Id process() const override { return host_->process(); }
  gpu::Id device() const override { return host_->device(); }
  std::string describe() const override { return host_->describe(); }
  int resident_blocks() const override { return host_->resident_blocks(); }
  std::byte* allocate(std::size_t bytes) override { return host_->allocate(bytes); }
  void release(std::byte* memory) noexcept override { host_->release(memory); }
  gpu::MemoryName name_of(std::byte* memory) override { return host_->name_of(memory); }
  std::byte* open(const gpu::MemoryName& name) override { return host_->open(name); }
  void close(std::byte* opened) noexcept override { host_->close(opened); }
  std::byte* allocate_host(std::size_t bytes) override { return host_->allocate_host(bytes); }
  void release_host(std::byte* memory) noexcept override { host_->release_host(memory); }
  void* stream() const override { return nullptr; }
  void copy(void* to, const void* from, std::size_t bytes) override {
    host_->copy(to, from, bytes);
  }
  void start(const gpu::KernelArgs& task, const gpu::Grid& grid, void* stream) override {
    if (stream == nullptr) return host_->start(task, grid, nullptr);  // before any other
    Queue& queue = *static_cast<Queue*>(stream);
    last_.block(queue);
    queue.put([this, task, grid] { host_->start(task, grid, nullptr); });
    last_.record(queue);
  }
  void copy_later(void* to, const void* from, std::size_t bytes, void* stream) override {
    Queue& queue = *static_cast<Queue*>(stream);
    last_.block(queue);
    queue.put([this, to, from, bytes] { host_->copy(to, from, bytes); });
    last_.record(queue);
  }
  void drain() override { last_.wait(); }

 private:
  std::unique_ptr<gpu::Driver> host_;
  Mark last_;
};

/// Whether calls of this thread count as captured into a graph.
thread_local bool captures = false;

std::unique_ptr<gpu::Driver> make_driver() {
  return std::make_unique<StreamDriver>(current_stream().device_index());
}

/// For Options._serve_device. The smallest pages make many rounds of few bytes.
/// `turn`: assumed seconds of a turn; with nearly 0, every call that can be in place is.
/// `chunk`: bytes of a tensor that are sent between hosts at a time.
py::capsule kind(int lanes, int blocks, std::size_t page_bytes, double turn, std::size_t chunk) {
  auto* made = new DeviceKind{
      kDeviceType, make_driver, [](void*) { return captures; },
      gpu::CommunicatorOptions{
          .page_bytes = page_bytes, .most_blocks = blocks, .lanes = lanes, .costs = {.turn = turn}},
      chunk};
  return {made, [](void* held) { delete static_cast<DeviceKind*>(held); }};
}

/// Adds slow work to the current stream.
void delay(double seconds) {
  queue_of(current_stream()).put([seconds] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  });
}

/// Calls `task` in the order of the current stream. It must end before Python does.
void put(py::function task) {
  auto held = std::make_shared<py::function>(std::move(task));
  queue_of(current_stream()).put([held = std::move(held)]() mutable {
    const py::gil_scoped_acquire gil;
    const auto called = std::move(held);
    try {
      (*called)();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a task of a stream");
    }
  });
}

/// Holds the current stream until it is opened; for ever would hang a test that fails.
class Gate {
 public:
  Gate() {
    queue_of(current_stream()).put([opened = opened_.get_future().share(), late = late_] {
      *late = opened.wait_for(std::chrono::seconds(60)) == std::future_status::timeout;
    });
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void open() {
    if (*late_) throw std::runtime_error("the device was waited for while it was held");
    opened_.set_value();
  }

 private:
  std::promise<void> opened_;
  std::shared_ptr<std::atomic<bool>> late_ = std::make_shared<std::atomic<bool>>(false);
};

void use_device(int index) {
  c10::impl::getDeviceGuardImpl(kDeviceType)
      ->setDevice(c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(index)));
}

/// Another stream becomes the current one; returns the one before.
std::int64_t use_stream(std::int64_t id) {
  const c10::Stream stream(c10::Stream::UNSAFE, current_stream().device(), id);
  return c10::impl::getDeviceGuardImpl(kDeviceType)->exchangeStream(stream).id();
}

std::int64_t new_stream() {
  return c10::impl::getDeviceGuardImpl(kDeviceType)->getNewStream(current_stream().device()).id();
}

}  // namespace
}  // namespace dreamcomm::testing

PYBIND11_MODULE(dreamcomm_test_device, m) {
  using namespace dreamcomm::testing;
  py::module_::import("torch.distributed");  // has Engine's base
  m.def("kind", &kind, py::arg("lanes") = 3, py::arg("blocks") = 2, py::arg("page_bytes") = 512,
        py::arg("turn") = 4e-6, py::arg("chunk") = 1 << 20);
  m.def("capture", [](bool on) { captures = on; });
  m.def("calls_in_place", &host_calls_in_place);
  m.def("delay", &delay);
  m.def("put", &put, py::arg("task"));
  // The same memory as a tensor of the host, for tasks of streams; it does not keep the memory.
  m.def("on_host", &on_host, py::arg("tensor"));
  py::class_<Gate>(m, "Gate").def(py::init<>()).def("open", &Gate::open);
  py::class_<Board, std::shared_ptr<Board>>(m, "Board")
      .def(py::init<>())
      .def("failure", &Board::failure)
      .def("traffic", &Board::traffic);
  py::class_<Engine, c10d::Backend, c10::intrusive_ptr<Engine>>(m, "Engine")
      .def(py::init<std::shared_ptr<Board>, int, int>());
  m.def("use_device", &use_device);
  m.def("use_stream", &use_stream);
  m.def("new_stream", &new_stream);
  m.def("memory_in_use", &host_memory_in_use);
  m.def("to_device", [](const at::Tensor& host) {
    const at::Tensor made = empty_on_device(host.sizes(), host.strides(), host.scalar_type());
    made.copy_(host);
    return made;
  });
  // Waits for the current stream.
  m.def(
      "to_host",
      [](const at::Tensor& tensor) {
        const at::Tensor host = at::empty_strided(tensor.sizes(), tensor.strides(),
                                                  at::TensorOptions().dtype(tensor.scalar_type()));
        host.copy_(tensor);
        return host;
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "synchronize", [] { queue_of(current_stream()).wait(); },
      py::call_guard<py::gil_scoped_release>());
}
