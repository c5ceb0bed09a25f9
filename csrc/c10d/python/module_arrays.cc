#include "c10d/python/module_arrays.h"

#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "c10d/backend/backend.h"
#include "c10d/base/op_labels.h"
#include "kernels/reduce.h"

namespace dreamcomm {
namespace {

/// The element type of a buffer's format, as "d" or "<f"; none for others than the core's.
std::optional<DType> dtype_of(const Py_buffer& view) {
  std::string_view format = view.format == nullptr ? "B" : view.format;
  if (!format.empty() && std::string_view("@=<").find(format[0]) != std::string_view::npos) {
    format.remove_prefix(1);
  }
  if (format == "Zf") return DType::kComplex64;
  if (format == "Zd") return DType::kComplex128;
  if (format.size() != 1) return std::nullopt;
  constexpr std::array kSigned{DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64};
  constexpr std::array kUnsigned{DType::kUInt8, DType::kUInt16, DType::kUInt32, DType::kUInt64};
  std::size_t log = 0;
  while ((1L << log) < view.itemsize) ++log;
  if (log >= kSigned.size()) return std::nullopt;
  switch (format[0]) {
    case '?':
      return DType::kBool;
    case 'e':
      return DType::kFloat16;
    case 'f':
      return DType::kFloat32;
    case 'd':
      return DType::kFloat64;
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
    case 'n':
      return kSigned[log];
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
    case 'N':
      return kUnsigned[log];
    default:
      return std::nullopt;
  }
}

/// The contiguous buffers of a call's arrays, which are held as long as this lives. Needs the GIL.
class Buffers {
 public:
  Buffers() = default;
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }

  /// Adds an array's blocks, `parts` of equal size. Returns its type; none if the core has no such
  /// elements, the parts are unequal, or there is no such buffer: not contiguous, or not writable.
  std::optional<DType> take(PyObject* array, bool writes, std::size_t parts,
                            std::vector<Block>& blocks) {
    Py_buffer view;
    const int wanted = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writes ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(array, &view, wanted) != 0) {
      PyErr_Clear();
      return std::nullopt;
    }
    views_.push_back(view);
    if (view.itemsize == 0) return std::nullopt;
    if (static_cast<std::size_t>(view.len / view.itemsize) % parts != 0) return std::nullopt;
    const std::size_t bytes = static_cast<std::size_t>(view.len) / parts;
    for (std::size_t part = 0; part < parts; ++part) {
      blocks.push_back({static_cast<std::byte*>(view.buf) + part * bytes, bytes});
    }
    return dtype_of(view);
  }

 private:
  c10::SmallVector<Py_buffer, 2> views_;  // only what releasing reads: it may move
};

const OpLabel& label_of(Kind kind) {
  switch (kind) {
    case Kind::kBroadcast:
      return kBroadcast;
    case Kind::kAllReduce:
      return kAllReduce;
    case Kind::kReduce:
      return kReduce;
    case Kind::kAllGather:
      return kAllGatherBase;
    case Kind::kGather:
      return kGather;
    case Kind::kScatter:
      return kScatter;
    case Kind::kReduceScatter:
      return kReduceScatterBase;
    case Kind::kAllToAll:
      return kAllToAllBase;
    default:
      return kBarrier;
  }
}

/// A call as Python describes it, read with the GIL.
struct ArrayCall {
  Kind kind;
  Reduction reduction;
  int root;
  std::vector<Block> in;
  std::vector<Block> out;
  Buffers buffers{};

  Request request() const {
    Request made{.kind = kind, .reduction = reduction, .in = in, .out = out, .root = root};
    return made;
  }
};

/// Reads the arrays. Returns false if one has no buffer that the core can use.
bool read(ArrayCall& call, const py::tuple& inputs, const py::tuple& outputs, std::size_t in_parts,
          std::size_t out_parts) {
  std::optional<DType> type;
  const auto take = [&](py::handle array, bool writes, std::size_t parts,
                        std::vector<Block>& blocks) {
    const std::optional<DType> found = call.buffers.take(array.ptr(), writes, parts, blocks);
    if (!found || (type && *type != *found)) return false;
    type = found;
    return true;
  };
  for (const py::handle array : inputs) {
    if (!take(array, false, in_parts, call.in)) return false;
  }
  for (const py::handle array : outputs) {
    if (!take(array, true, out_parts, call.out)) return false;
  }
  if (type) call.reduction.dtype = *type;
  return true;
}

/// Sets the operation of a reduction. Returns false if the type has none such: torch's path says
/// so.
bool set_operation(ArrayCall& call, int op, int ranks) {
  if (op < 0) return true;
  call.reduction.op = static_cast<ReduceOp>(op);
  call.reduction.divisor = ranks;
  return is_defined(call.reduction.op, call.reduction.dtype);
}

/// A group's collectives on buffers.
class ArrayCalls {
 public:
  explicit ArrayCalls(c10::intrusive_ptr<DreamBackend> backend) : backend_(std::move(backend)) {}

  /// Runs a collective. False where torch's path has to serve it.
  bool run(int kind, int op, int root, const py::tuple& inputs, const py::tuple& outputs,
           std::size_t in_parts, std::size_t out_parts) {
    ArrayCall call{static_cast<Kind>(kind), {}, root, {}, {}};
    if (!backend_->shares_memory() || !read(call, inputs, outputs, in_parts, out_parts) ||
        !set_operation(call, op, backend_->getSize())) {
      return false;
    }
    const py::gil_scoped_release release;
    backend_->run_blocks(label_of(call.kind), call.request());
    return true;
  }

  /// The same for an all_reduce in place, which is called most.
  bool all_reduce(py::handle array, int op) {
    Buffers buffers;
    std::vector<Block> block;
    const std::optional<DType> type = buffers.take(array.ptr(), true, 1, block);
    ArrayCall call{Kind::kAllReduce, {}, 0, {}, {}};
    if (!type || !backend_->shares_memory()) return false;
    call.reduction.dtype = *type;
    if (!set_operation(call, op, backend_->getSize())) return false;
    const Request request{
        .kind = call.kind, .reduction = call.reduction, .in = block, .out = block};
    const py::gil_scoped_release release;
    backend_->run_blocks(kAllReduce, request);
    return true;
  }

 private:
  c10::intrusive_ptr<DreamBackend> backend_;
};

}  // namespace

void bind_arrays(pybind11::module_& m) {
  py::class_<ArrayCalls>(m, "ArrayCalls")
      .def(py::init<c10::intrusive_ptr<DreamBackend>>(), py::arg("backend"))
      .def("run", &ArrayCalls::run, py::arg("kind"), py::arg("op"), py::arg("root"),
           py::arg("inputs"), py::arg("outputs"), py::arg("in_parts"), py::arg("out_parts"))
      .def("all_reduce", &ArrayCalls::all_reduce, py::arg("array"), py::arg("op"));
}

}  // namespace dreamcomm
