#include <algorithm>
#include <memory>
#include <span>

#include "gpu/bucket/kernels.cuh"
#include "gpu/bucket/launch.h"
#include "gpu/cuda/check.cuh"

namespace dreamcomm::gpu {
namespace {

constexpr int kBlocksEach = 8;  // most blocks for each multiprocessor

__global__ void __launch_bounds__(kBucketLanes)
    finish_kernel(const double* partials, std::size_t count, double* squares, bool* finite) {
  finish_body(CudaTarget(), partials, count, squares, finite, shared_scratch());
}

BucketKernel kernel_of(bool packs, DType from, DType to) {
  for (const DType type : {from, to}) {
    check(is_packable(type), ErrorKind::kInvalid,
          "expected elements of type float32, float64, bfloat16 or float16, got ", name(type));
  }
  switch (from) {
    case DType::kFloat32:
      return bucket_kernel_from_float32(packs, to);
    case DType::kFloat64:
      return bucket_kernel_from_float64(packs, to);
    case DType::kFloat16:
      return bucket_kernel_from_float16(packs, to);
    default:
      return bucket_kernel_from_bfloat16(packs, to);
  }
}

unsigned processors() {
  int device = 0;
  int count = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  return static_cast<unsigned>(count);
}

void start(const void* kernel, unsigned blocks, void** arguments, std::size_t scratch,
           void* stream) {
  check_cuda(cudaLaunchKernel(kernel, dim3(blocks), dim3(kBucketLanes), arguments, scratch,
                              static_cast<cudaStream_t>(stream)),
             "cudaLaunchKernel");
}

/// Fills only the entries in use: CUDA copies the whole table, but the kernel reads no others.
template <int kCount>
void start_row(const void* kernel, BucketRow& row, unsigned blocks, std::size_t scratch,
               void* stream) {
  const auto table = std::make_unique_for_overwrite<PartTable<kCount>>();
  std::copy(row.parts.begin(), row.parts.end(), table->at);
  void* arguments[] = {&row.task, table.get()};
  start(kernel, blocks, arguments, scratch, stream);
}

unsigned blocks_for(std::size_t count, const BucketKernel& kernel) {
  return std::min(static_cast<unsigned>(chunks(count, kernel.tile)), kBlocksEach * processors());
}

/// Starts a kernel with its table in device memory. Returns false if the table cannot be put there,
/// or is not needed.
bool start_listed(const BucketKernel& kernel, const Bucket& bucket, std::size_t scratch,
                  void* stream, const Stage& stage) {
  if (!stage || bucket.parts.size() <= std::size_t{kManyParts} || bucket.task.count == 0) {
    return false;
  }
  const void* parts = stage(std::as_bytes(std::span(bucket.parts)));
  if (parts == nullptr) return false;
  BucketTask task = bucket.task;
  task.parts = static_cast<int>(bucket.parts.size());
  void* arguments[] = {&task, &parts};
  start(kernel.listed, blocks_for(task.count, kernel), arguments, scratch, stream);
  return true;
}

void start_all(const BucketKernel& kernel, const Bucket& bucket, void* stream, const Stage& stage) {
  const std::size_t scratch = bucket.task.partials == nullptr ? 0 : kernel.scratch;
  if (start_listed(kernel, bucket, scratch, stream, stage)) return;
  for (BucketRow& row : rows_of(bucket)) {
    const unsigned blocks = blocks_for(row.task.count, kernel);
    if (row.task.parts <= kFewParts) {
      start_row<kFewParts>(kernel.few, row, blocks, scratch, stream);
    } else {
      start_row<kManyParts>(kernel.many, row, blocks, scratch, stream);
    }
  }
}

}  // namespace

Moved pack(const PackJob& job, void* stream, const Stage& stage) {
  const BucketKernel kernel = kernel_of(true, job.from, job.to);
  const Bucket bucket = bucket_of(job);
  start_all(kernel, bucket, stream, stage);
  return moved_by(job);
}

Moved unpack(const UnpackJob& job, const Inspection& inspection, void* stream, const Stage& stage) {
  const BucketKernel kernel = kernel_of(false, job.from, job.to);
  check(job.divisor >= 1, ErrorKind::kInvalid, "expected a divisor of at least 1, got ",
        job.divisor);
  const Bucket bucket = bucket_of(job, job.inspect ? inspection.partials : nullptr);
  start_all(kernel, bucket, stream, stage);
  if (job.inspect) {
    Inspection to = inspection;
    std::size_t count = partials_of(bucket.task.count);
    void* arguments[] = {&to.partials, &count, &to.squares, &to.finite};
    start(reinterpret_cast<const void*>(&finish_kernel), 1, arguments, kFinishScratch, stream);
  }
  return moved_by(job);
}

}  // namespace dreamcomm::gpu
