#include "c10d/python/module_arrays.h"

#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "c10d/backend/backend.h"
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

/// The contiguous, writable buffer of an array, which is held as long as this lives. Needs the GIL.
class Buffer {
 public:
  explicit Buffer(PyObject* array) {
    constexpr int kWanted = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE;
    is_held_ = PyObject_GetBuffer(array, &view_, kWanted) == 0;
    if (!is_held_) PyErr_Clear();
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (is_held_) PyBuffer_Release(&view_);
  }

  /// None if there is no such buffer, or its elements are not the core's.
  std::optional<DType> type() const { return is_held_ ? dtype_of(view_) : std::nullopt; }
  Block block() const {
    return {static_cast<std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_;
  bool is_held_;
};

std::optional<c10d::ReduceOp> operation(int op) {
  if (op < 0) return std::nullopt;
  return c10d::ReduceOp(static_cast<c10d::ReduceOp::RedOpType>(op));
}

/// A group's collectives on arrays.
class ArrayCalls {
 public:
  explicit ArrayCalls(c10::intrusive_ptr<DreamBackend> backend) : backend_(std::move(backend)) {}

  /// All-reduces a contiguous buffer in place. False if it is none, or has elements of a type that
  /// the core or the operation does not know. Needs the GIL.
  bool all_reduce(PyObject* array, int op) const {
    if (!backend_->shares_memory()) return false;
    const Buffer buffer(array);
    const std::optional<DType> type = buffer.type();
    if (!type) return false;
    Reduction how{.dtype = *type, .op = static_cast<ReduceOp>(op)};
    how.divisor = backend_->getSize();
    if (!is_defined(how.op, how.dtype)) return false;
    const Block block = buffer.block();
    const py::gil_scoped_release release;
    backend_->run_blocks(
        {.kind = Kind::kAllReduce, .reduction = how, .in = {&block, 1}, .out = {&block, 1}});
    return true;
  }

  /// Runs a collective on tensors of the CPU.
  WorkPtr run_tensors(int kind, int op, int root, const std::optional<at::Tensor>& input,
                      std::vector<std::size_t> in_sizes, int copies,
                      const std::optional<at::Tensor>& output, std::vector<std::size_t> out_sizes,
                      std::uint32_t digest, bool async) {
    const DreamBackend::ArrayCall call{.kind = static_cast<Kind>(kind),
                                       .op = operation(op),
                                       .root = root,
                                       .input = input,
                                       .in_sizes = std::move(in_sizes),
                                       .copies = copies,
                                       .output = output,
                                       .out_sizes = std::move(out_sizes),
                                       .digest = digest,
                                       .async = async};
    const py::gil_scoped_release release;
    return backend_->run_arrays(call);
  }

  WorkPtr run_together(const std::vector<at::Tensor>& tensors, int op, int root,
                       std::uint32_t digest, bool async) {
    const py::gil_scoped_release release;
    return backend_->run_together(tensors, operation(op), root, digest, async);
  }

  void refuse(const std::string& why) { backend_->refuse(why); }

 private:
  c10::intrusive_ptr<DreamBackend> backend_;
};

// A method of a Python class that calls all_reduce() without a Python frame, tuple or dict between:
// those would take longer than the call. The class's own method serves the other calls.

constexpr const char* kDoor = "dreamcomm.ArrayCalls";

/// An instance's _quick: (capsule of its ArrayCalls, list of pending calls, the operations'
/// numbers, the type of arrays that are served); or None, when it is closed.
struct Door {
  py::object held;  // keeps the rest: a signal's handler may close the instance during the call
  const ArrayCalls* calls;
  PyObject* operations;
  PyObject* type;  // subclasses may be more than their memory, as masked arrays are
};

std::optional<Door> door_of(PyObject* self) {
  static PyObject* const name = PyUnicode_InternFromString("_quick");
  PyObject* const held = PyObject_GetAttr(self, name);
  if (held == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  auto kept = py::reinterpret_steal<py::object>(held);
  if (!PyTuple_Check(held) || PyList_GET_SIZE(PyTuple_GET_ITEM(held, 1)) != 0) return std::nullopt;
  void* const calls = PyCapsule_GetPointer(PyTuple_GET_ITEM(held, 0), kDoor);
  return Door{std::move(kept), static_cast<const ArrayCalls*>(calls), PyTuple_GET_ITEM(held, 2),
              PyTuple_GET_ITEM(held, 3)};
}

/// The arguments of an all_reduce in place, and nothing else.
struct InPlace {
  PyObject* array;
  PyObject* op;  // null: the default
};

std::optional<InPlace> in_place(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  static PyObject* const out_name = PyUnicode_InternFromString("out");
  static PyObject* const op_name = PyUnicode_InternFromString("op");
  if (names == nullptr || count < 1 || count > 2) return std::nullopt;
  InPlace found{args[0], count == 2 ? args[1] : nullptr};
  bool is_out = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* const name = PyTuple_GET_ITEM(names, i);
    if (name == out_name && args[count + i] == found.array) {
      is_out = true;
    } else if (name == op_name && found.op == nullptr) {
      found.op = args[count + i];
    } else {
      return std::nullopt;
    }
  }
  return is_out ? std::optional(found) : std::nullopt;
}

/// The operation's number; none if it is not one of a plain name.
std::optional<int> number_of(PyObject* op, PyObject* operations) {
  if (op == nullptr) return 0;
  if (!PyUnicode_CheckExact(op)) return std::nullopt;
  PyObject* const number = PyDict_GetItemWithError(operations, op);
  if (number == nullptr) return std::nullopt;
  return static_cast<int>(PyLong_AsLong(number));
}

/// True if the call was made.
bool try_all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const std::optional<InPlace> call = in_place(args, count, names);
  if (!call) return false;
  const std::optional<Door> door = door_of(self);
  if (!door || reinterpret_cast<PyObject*>(Py_TYPE(call->array)) != door->type) return false;
  const std::optional<int> op = number_of(call->op, door->operations);
  return op && door->calls->all_reduce(call->array, *op);
}

PyObject* quick_all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t count,
                           PyObject* names) {
  HANDLE_TH_ERRORS
  if (try_all_reduce(self, args, count, names)) {
    Py_INCREF(args[0]);
    return args[0];
  }
  END_HANDLE_TH_ERRORS
  static PyObject* const name = PyUnicode_InternFromString("_all_reduce");
  std::vector<PyObject*> all{self};
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  all.insert(all.end(), args, args + count + named);
  return PyObject_VectorcallMethod(name, all.data(), static_cast<std::size_t>(count) + 1, names);
}

/// Returns the method, for a class that has _quick and _all_reduce. `text`: its documentation.
py::object quick_method(const py::type& type, const std::string& text) {
  static const std::string kept = text;  // as long as the class
  static PyMethodDef method{
      "all_reduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&quick_all_reduce)),
      METH_FASTCALL | METH_KEYWORDS, kept.c_str()};
  PyObject* const made = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &method);
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

py::capsule door(const ArrayCalls& calls) {
  return py::capsule(new ArrayCalls(calls), kDoor, [](void* held) {
    const py::gil_scoped_release release;  // the group's end may wait for its threads
    delete static_cast<ArrayCalls*>(held);
  });
}

}  // namespace

void bind_arrays(pybind11::module_& m) {
  py::class_<ArrayCalls>(m, "ArrayCalls")
      .def(py::init<c10::intrusive_ptr<DreamBackend>>(), py::arg("backend"))
      .def_property_readonly("door", &door)
      .def("run_tensors", &ArrayCalls::run_tensors, py::arg("kind"), py::arg("op"), py::arg("root"),
           py::arg("input"), py::arg("in_sizes"), py::arg("copies"), py::arg("output"),
           py::arg("out_sizes"), py::arg("digest"), py::arg("asynchronous"))
      .def("run_together", &ArrayCalls::run_together, py::arg("tensors"), py::arg("op"),
           py::arg("root"), py::arg("digest"), py::arg("asynchronous"))
      .def("refuse", &ArrayCalls::refuse, py::arg("why"));
  m.def("quick_all_reduce", &quick_method, py::arg("type"), py::arg("text"));
}

}  // namespace dreamcomm
