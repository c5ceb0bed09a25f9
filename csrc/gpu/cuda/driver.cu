#include <cstring>
#include <map>
#include <set>

#include "gpu/cuda/check.cuh"
#include "gpu/cuda/driver.h"
#include "gpu/host/memory.h"
#include "gpu/host/process_id.h"

namespace dreamcomm::gpu {
namespace {

constexpr char kNoIpc[] =
    "; processes in different containers need one IPC namespace (docker: --ipc=host), and slices "
    "of a device (MIG) cannot share memory. Tensors on cuda go to torch's NCCL group instead";

/// CUDA does not work in a forked child of a process that has used it.
constexpr char kForked[] =
    "; was this process forked from a parent that had used CUDA? Start it by spawn instead";

cudaIpcMemHandle_t handle_in(const MemoryName& name) {
  static_assert(sizeof(cudaIpcMemHandle_t) == sizeof name.ipc);
  cudaIpcMemHandle_t handle;
  std::memcpy(&handle, name.ipc.data(), sizeof handle);
  return handle;
}

/// Makes the device this thread's current one in its scope. It ignores errors: if the device is
/// lost, the calls that follow report it.
class OnDevice {
 public:
  explicit OnDevice(int device) noexcept {
    cudaGetDevice(&before_);
    if (before_ != device) cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

class CudaDriver final : public Driver {
 public:
  CudaDriver() {
    int device = 0;
    const cudaError_t found = cudaGetDevice(&device);
    check(found != cudaErrorInitializationError, ErrorKind::kSystem,
          "cudaGetDevice: CUDA said cudaErrorInitializationError", kForked);
    check_cuda(found, "cudaGetDevice");
    load_kernels();
    check_cuda(cudaGetDeviceProperties(&properties_, device), "cudaGetDeviceProperties");
    device_ = device;
    for (cudaEvent_t* event : {&last_, &last_captured_}) {
      check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreate");
    }
  }
  ~CudaDriver() override {
    cudaEventDestroy(last_);
    cudaEventDestroy(last_captured_);
  }

  Id process() const override { return process_; }

  Id device() const override {
    Id id{};
    static_assert(sizeof properties_.uuid == sizeof id);
    std::memcpy(id.data(), &properties_.uuid, sizeof id);
    return id;
  }

  std::string describe() const override { return concat("cuda:", device_, ' ', properties_.name); }

  // A kernel's launch bounds let a block of it run on every multiprocessor.
  int resident_blocks() const override { return properties_.multiProcessorCount; }

  std::byte* allocate(std::size_t bytes) override {
    const OnDevice here(device_);
    auto memory = std::make_unique<DeviceMemory>(bytes);
    std::byte* const data = memory->data();
    memory_.emplace(data, std::move(memory));
    return data;
  }
  void release(std::byte* memory) noexcept override {
    const OnDevice here(device_);
    memory_.erase(memory);
  }

  MemoryName name_of(std::byte* memory) override {
    const OnDevice here(device_);
    MemoryName name;
    name.process = process_;
    name.address = reinterpret_cast<std::uint64_t>(memory);
    cudaIpcMemHandle_t handle;
    const cudaError_t result = cudaIpcGetMemHandle(&handle, memory);
    if (result != cudaSuccess) {  // ranks of this process need none
      cudaGetLastError();
      return name;
    }
    std::memcpy(name.ipc.data(), &handle, sizeof handle);
    return name;
  }

  std::byte* open(const MemoryName& name) override {
    const OnDevice here(device_);
    if (name.process == process_) return open_here(name);
    check(name.ipc != MemoryName{}.ipc, ErrorKind::kSystem,
          "CUDA gives no name of a peer's memory to other processes (cudaIpcGetMemHandle)", kNoIpc);
    void* opened = nullptr;
    const cudaError_t result =
        cudaIpcOpenMemHandle(&opened, handle_in(name), cudaIpcMemLazyEnablePeerAccess);
    if (result != cudaSuccess) {
      cudaGetLastError();
      throw Error(ErrorKind::kSystem,
                  concat("cudaIpcOpenMemHandle: CUDA said ", cudaGetErrorName(result), " (",
                         cudaGetErrorString(result), ')', kNoIpc));
    }
    opened_.insert(opened);
    return static_cast<std::byte*>(opened);
  }

  void close(std::byte* opened) noexcept override {
    const OnDevice here(device_);
    if (opened_.erase(opened) > 0) cudaIpcCloseMemHandle(opened);
  }

  std::byte* allocate_host(std::size_t bytes) override {
    const OnDevice here(device_);
    auto memory = std::make_unique<MappedMemory>(bytes);
    std::byte* const data = memory->data();
    host_memory_.emplace(data, std::move(memory));
    return data;
  }
  void release_host(std::byte* memory) noexcept override {
    const OnDevice here(device_);
    host_memory_.erase(memory);
  }

  void* stream() const override { return stream_.get(); }
  void copy(void* to, const void* from, std::size_t bytes) override {
    const OnDevice here(device_);
    stream_.copy(to, from, bytes);
  }

  void start(const KernelArgs& args, const Grid& grid, void* stream) override {
    put_in_order(stream, [&](cudaStream_t) { launch(args, grid, stream); });
  }
  void copy_later(void* to, const void* from, std::size_t bytes, void* stream) override {
    put_in_order(stream, [&](cudaStream_t on) {
      check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, on), "cudaMemcpyAsync");
    });
  }

  // Replays of graphs are not known one by one, so then the whole device is waited for. Otherwise
  // other work on the device is not waited for: it may be a call of another group, which waits for
  // a rank that closes this group first.
  void drain() override {
    const OnDevice here(device_);
    if (captured_) check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    check_cuda(cudaEventSynchronize(last_), "cudaEventSynchronize");
  }

 private:
  // A graph's capture cannot wait for an event from before it, and later calls cannot wait for an
  // event recorded in it. Within one capture, streams are ordered as outside.
  template <typename Put>
  void put_in_order(void* stream, const Put& put) {
    const OnDevice here(device_);
    const auto on = static_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0;
    check_cuda(cudaStreamGetCaptureInfo(on, &status, &capture), "cudaStreamGetCaptureInfo");
    const bool captures = status != cudaStreamCaptureStatusNone;
    const cudaEvent_t last = captures ? last_captured_ : last_;
    // Waits also if the handle is that of the last call's stream: it may be another stream by now.
    if (!captures || capture == capture_) {
      check_cuda(cudaStreamWaitEvent(on, last, 0), "cudaStreamWaitEvent");
    }
    put(on);
    captured_ = captured_ || captures;
    if (captures) capture_ = capture;
    check_cuda(cudaEventRecord(last, on), "cudaEventRecord");
  }

  std::byte* open_here(const MemoryName& name) {
    void* const address = reinterpret_cast<void*>(name.address);
    cudaPointerAttributes attributes{};
    check_cuda(cudaPointerGetAttributes(&attributes, address), "cudaPointerGetAttributes");
    if (attributes.device != device_) {
      const cudaError_t result = cudaDeviceEnablePeerAccess(attributes.device, 0);
      if (result == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
      } else {
        check_cuda(result, "cudaDeviceEnablePeerAccess");
      }
    }
    return static_cast<std::byte*>(address);
  }

  const Id process_ = process_id();
  int device_ = 0;
  cudaDeviceProp properties_{};
  std::map<std::byte*, std::unique_ptr<DeviceMemory>> memory_;
  std::map<std::byte*, std::unique_ptr<MappedMemory>> host_memory_;
  std::set<void*> opened_;
  OwnStream stream_;
  cudaEvent_t last_ = nullptr;
  bool captured_ = false;  // whether any call has been captured
  cudaEvent_t last_captured_ = nullptr;
  unsigned long long capture_ = 0;  // the capture that last_captured_ belongs to
};

}  // namespace

std::unique_ptr<Driver> make_cuda_driver() { return std::make_unique<CudaDriver>(); }

}  // namespace dreamcomm::gpu
