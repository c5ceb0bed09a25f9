// The Python module dreamcomm._C: the backend and its options.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "c10d/backend/backend.h"
#include "c10d/base/convert.h"
#include "c10d/base/pages.h"
#include "c10d/process/process_heap.h"
#include "c10d/python/bucket_ops.h"
#include "c10d/python/callbacks.h"
#include "c10d/python/module_arrays.h"
#include "c10d/python/module_batch_norm.h"
#include "c10d/python/module_buckets.h"
#include "c10d/python/module_cost_model.h"
#include "c10d/python/module_messages.h"
#include "c10d/python/module_optimizer.h"
#include "c10d/python/module_recorder.h"
#include "c10d/python/module_region.h"
#include "c10d/python/module_registered.h"
#include "c10d/python/module_replicas.h"
#include "c10d/python/module_units.h"
#include "core/cpus.h"
#include "gpu/host/launch.h"
#include "kernels/reduce.h"
#include "transport/introspect/window_reader.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;
using BackendPtr = c10::intrusive_ptr<DreamBackend>;
using OptionsPtr = c10::intrusive_ptr<DreamOptions>;

BackendPtr make_backend(const StorePtr& store, int rank, int size, const OptionsPtr& options,
                        py::object make_inner) {
  const PythonCallbacks host = make_callbacks(std::move(make_inner));
  const py::gil_scoped_release release;
  return DreamBackend::create(store, rank, size, options, host);
}

/// {"all_reduce": {"calls": 3, "sent": 4096, "received": 4096}, ...}
py::dict to_dict(const std::array<Traffic, kKinds>& traffic) {
  py::dict result;
  for (int k = 0; k < kKinds; ++k) {
    const Traffic& t = traffic[static_cast<std::size_t>(k)];
    py::dict row;
    row["calls"] = t.calls;
    row["sent"] = t.sent;
    row["received"] = t.received;
    row["in_place"] = t.in_place;
    result[py::str(std::string(name(static_cast<Kind>(k))))] = row;
  }
  return result;
}

/// A group's calls and bytes. In a group on several nodes: its calls, the bytes of their parts
/// within this rank's host, and those between nodes.
py::dict stats_of(const DreamBackend& backend) {
  py::dict stats = to_dict(backend.traffic());
  const auto between = backend.traffic_between();
  if (!between) return stats;
  for (int k = 0; k < kKinds; ++k) {
    const WireTraffic& wire = (*between)[static_cast<std::size_t>(k)];
    const py::dict of_kind = stats[name(static_cast<Kind>(k)).data()];
    of_kind["sent_between_hosts"] = wire.sent;
    of_kind["received_between_hosts"] = wire.received;
  }
  return stats;
}

OptionsPtr make_options(milliseconds timeout, std::string algorithm, bool fixed_order,
                        std::size_t page_bytes, std::size_t message_bytes, bool shared_memory,
                        std::size_t heap_bytes, std::string costs, std::string cuda,
                        std::size_t cuda_heap_bytes, bool log, std::string hosts,
                        std::string internode_dtype,
                        std::optional<std::string> halves_between_hosts) {
  auto options = c10::make_intrusive<DreamOptions>(bounded(timeout));
  options->algorithm = algorithm_named(algorithm);
  options->fixed_order = fixed_order;
  options->page_bytes = page_bytes;
  options->message_bytes = message_bytes;
  options->shared_memory = shared_memory;
  options->heap_bytes = heap_bytes;
  options->costs = std::move(costs);
  options->cuda = std::move(cuda);
  options->cuda_heap_bytes = cuda_heap_bytes;
  options->log = log;
  options->hosts = std::move(hosts);
  options->internode_dtype = halves_between_hosts.value_or(internode_dtype);
  require_valid(*options);
  return options;
}

std::string repr(const DreamOptions& options) {
  const auto boolean = [](bool value) { return value ? "True" : "False"; };
  return concat(
      "Options(timeout=timedelta(milliseconds=", options.timeout.count(), "), algorithm='",
      options.algorithm, "', fixed_order=", boolean(options.fixed_order),
      ", page_bytes=", options.page_bytes, ", message_bytes=", options.message_bytes,
      ", shared_memory=", boolean(options.shared_memory), ", heap_bytes=", options.heap_bytes,
      ", costs='", options.costs, "', cuda='", options.cuda,
      "', cuda_heap_bytes=", options.cuda_heap_bytes, ", log=", boolean(options.log), ", hosts='",
      options.hosts, "', internode_dtype='", options.internode_dtype, "')");
}

py::tuple fields_of(const DreamOptions& options) {
  return py::make_tuple(options.timeout, options.algorithm, options.fixed_order, options.page_bytes,
                        options.message_bytes, options.shared_memory, options.heap_bytes,
                        options.costs, options.cuda, options.cuda_heap_bytes, options.log,
                        options.hosts, options.internode_dtype);
}

/// For tests: another accelerator than CUDA, by a capsule that holds a DeviceKind.
void serve_device(DreamOptions& options, const py::capsule& kind) {
  options.device = *kind.get_pointer<const DeviceKind>();
}

OptionsPtr copy_of(const DreamOptions& options) {
  return c10::make_intrusive<DreamOptions>(options);
}

void bind_options(py::module_& m) {
  const DreamOptions defaults;
  auto options = py::class_<DreamOptions, c10d::Backend::Options, OptionsPtr>(m, "Options", R"(
Settings of a dreamcomm group, for the argument ``pg_options`` of
``init_process_group`` and ``new_group``. All ranks must give equal ones.

timeout (timedelta): for calls that give none themselves; replaced by the group's
    own ``timeout`` argument unless it differs from the default of 30 minutes.
algorithm (str): "auto", or one row of the table for all calls it serves:
    "direct" (also called "two_shot"), "one_shot", "ring", "master", "heap" (also called
    "zero_copy").
fixed_order (bool): reduce in rank order only, so that every rank, run and
    message size gives the same bits.
page_bytes (int): size of a rank's staging page for collectives; it has two.
message_bytes (int): size of one message buffer; two per pair of ranks.
heap_bytes (int): address space for tensors that peers read and write in place, one
    range for all groups of a process, whose size the first of them sets; pages are
    taken as they are used. 0: none. The default is half of the machine's memory.
costs (str): what the choice of an algorithm goes by. "auto": measured once on each
    machine for each number of ranks, in under a second, and kept in
    ~/.cache/dreamcomm; "fixed": the same everywhere; or such a file's path.
cuda (str): what carries tensors on GPUs. "nccl": torch's own NCCL group; "dreamcomm":
    this library's kernels, for ranks of one host (what they do not do goes to NCCL).
cuda_heap_bytes (int): with cuda="dreamcomm", memory of each rank's GPU for tensors that
    peers read and write in place, taken whole at the first call. 0: none.
log (bool): keep count of the operations' times, and the last of them; rank 0 prints a
    table at the group's end. See dreamcomm.comm_log. It may differ between ranks.
hosts (str): the host that each rank of the job counts to, by names such as "a,a,b,b": ranks
    of different ones share no memory, as if they were on two machines. "": ranks that can
    map each other's memory are one host.
internode_dtype (str): how float16 and bfloat16 are added up, and sent, in groups on
    several nodes. "float32" rounds once at the end; "16bit" sends half the bytes, and rounds
    each node's sum, too. The older name halves_between_hosts goes on working.
shared_memory (bool): False sends everything to torch's own Gloo or NCCL group.
)");
  options
      .def(py::init(&make_options), py::kw_only(), py::arg("timeout") = defaults.timeout,
           py::arg("algorithm") = defaults.algorithm, py::arg("fixed_order") = defaults.fixed_order,
           py::arg("page_bytes") = defaults.page_bytes,
           py::arg("message_bytes") = defaults.message_bytes,
           py::arg("shared_memory") = defaults.shared_memory,
           py::arg("heap_bytes") = defaults.heap_bytes, py::arg("costs") = defaults.costs,
           py::arg("cuda") = defaults.cuda, py::arg("cuda_heap_bytes") = defaults.cuda_heap_bytes,
           py::arg("log") = defaults.log, py::arg("hosts") = defaults.hosts,
           py::arg("internode_dtype") = defaults.internode_dtype,
           py::arg("halves_between_hosts") = py::none())
      .def_readwrite("timeout", &DreamOptions::timeout)
      .def_property(
          "algorithm", [](const DreamOptions& self) { return self.algorithm; },
          [](DreamOptions& self, const std::string& name) {
            self.algorithm = algorithm_named(name);
          })
      .def_readwrite("fixed_order", &DreamOptions::fixed_order)
      .def_readwrite("page_bytes", &DreamOptions::page_bytes)
      .def_readwrite("message_bytes", &DreamOptions::message_bytes)
      .def_readwrite("shared_memory", &DreamOptions::shared_memory)
      .def_readwrite("heap_bytes", &DreamOptions::heap_bytes)
      .def_readwrite("costs", &DreamOptions::costs)
      .def_readwrite("cuda", &DreamOptions::cuda)
      .def_readwrite("cuda_heap_bytes", &DreamOptions::cuda_heap_bytes)
      .def_readwrite("log", &DreamOptions::log)
      .def_readwrite("hosts", &DreamOptions::hosts)
      .def_readwrite("internode_dtype", &DreamOptions::internode_dtype)
      .def_readwrite("halves_between_hosts", &DreamOptions::internode_dtype)
      .def("_serve_device", &serve_device, py::arg("kind"))
      .def("__repr__", &repr)
      .def("__eq__",
           [](const DreamOptions& self, const DreamOptions& other) {
             return fields_of(self).equal(fields_of(other));
           })
      .def(py::pickle(&fields_of,
                      [](const py::tuple& fields) {
                        return make_options(
                            fields[0].cast<milliseconds>(), fields[1].cast<std::string>(),
                            fields[2].cast<bool>(), fields[3].cast<std::size_t>(),
                            fields[4].cast<std::size_t>(), fields[5].cast<bool>(),
                            fields[6].cast<std::size_t>(), fields[7].cast<std::string>(),
                            fields[8].cast<std::string>(), fields[9].cast<std::size_t>(),
                            fields[10].cast<bool>(), fields[11].cast<std::string>(),
                            fields[12].cast<std::string>(), std::nullopt);
                      }))
      .def("__copy__", &copy_of)
      .def("__deepcopy__", [](const DreamOptions& self, const py::dict&) { return copy_of(self); });
}

/// A tensor of one dimension in the process's heap, made with `heap_bytes` if there is none.
at::Tensor allocate(std::int64_t size, at::ScalarType dtype, std::size_t heap_bytes) {
  if (size < 0) throw py::value_error("expected a size from 0 on, got " + std::to_string(size));
  const at::TensorOptions options = at::TensorOptions().dtype(dtype);
  std::shared_ptr<Heap> heap;
  try {
    heap = process_heap(heap_bytes);
  } catch (const NoSharedMemory&) {  // as where it is full: collectives stage
    return at::empty({size}, options);
  }
  return allocate_tensor(*heap, size, options);
}

/// The text of memory that may not be a rank's: U+FFFD replaces bytes that are no UTF-8.
py::object decoded(const std::string& text) {
  return py::bytes(text).attr("decode")("utf-8", "replace");
}

/// A rank's state as tools see it, or None; or {"version": n} of another version.
py::object observe_rank(const std::string& path) {
  const std::optional<RankView> view = observe(path);
  if (!view) return py::none();
  py::dict seen;
  seen["version"] = view->version;
  if (view->version != kProtocolVersion) return seen;
  seen["pid"] = view->pid;
  seen["rank"] = view->rank;
  seen["size"] = view->size;
  seen["team"] = view->team;
  seen["group"] = decoded(view->group);
  constexpr const char* kStates[] = {"active", "left", "failed"};
  seen["state"] = kStates[std::min(static_cast<std::uint32_t>(view->status), 2U)];
  seen["reason"] = decoded(view->reason);
  seen["sequence"] = view->sequence;
  seen["operation"] = std::string(name(view->kind));
  seen["before"] = view->before ? std::string(name(*view->before)) : "";
  seen["nbytes"] = view->bytes;
  seen["entered_ns"] = view->entered_ns;
  seen["inside"] = view->inside;
  seen["waiting_for"] = view->waiting_for;
  seen["in_monitored_barrier"] = view->answers_barrier;
  seen["barrier_ns"] = view->barrier_began_ns;
  py::dict counts;
  for (std::size_t k = 0; k < view->counts.size(); ++k) {
    const RankView::Counts& one = view->counts[k];
    if (one.calls + one.sent + one.received == 0) continue;
    counts[py::str(std::string(name(static_cast<Kind>(k))))] =
        py::make_tuple(one.calls, one.sent, one.received);
  }
  seen["counts"] = counts;
  const RankView::Message& oldest = view->oldest;
  seen["messages"] = view->messages;
  seen["message"] = view->messages == 0
                        ? py::object(py::none())
                        : py::make_tuple(std::string(name(oldest.kind)), oldest.peer, oldest.bytes,
                                         oldest.since_ns);
  return seen;
}

void bind_backend(py::module_& m) {
  py::class_<DreamBackend, c10d::Backend, BackendPtr>(
      m, "DreamBackend", "The c10d backend of one group; made by init_process_group.")
      .def(py::init(&make_backend), py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("options"), py::arg("make_inner"))
      .def_property_readonly("options", &DreamBackend::getBackendOptions)
      .def_property_readonly("transport", &DreamBackend::transport)
      .def_property_readonly("shares_memory", &DreamBackend::shares_memory)
      .def_property_readonly("shares_heaps", &DreamBackend::shares_heaps)
      .def_property_readonly("failure", &DreamBackend::failure)
      .def_property_readonly("hosts", &DreamBackend::hosts)
      .def("_has_ended", &DreamBackend::has_ended, py::arg("rank"))
      .def_property_readonly("_level_costs", &level_costs_of)
      .def_property_readonly("_recorder", &DreamBackend::recorder)
      .def("_holds", &DreamBackend::holds, py::arg("tensor"))
      .def("_averages", &DreamBackend::averages, py::arg("tensor"),
           py::call_guard<py::gil_scoped_release>())
      // The members alone make it, in the order of `ranks`.
      .def(
          "_split",
          [](DreamBackend& self, const StorePtr& store, const std::vector<int>& ranks,
             const c10::intrusive_ptr<DreamOptions>& options) {
            return c10::static_intrusive_pointer_cast<DreamBackend>(
                self.split(store, ranks, options));
          },
          py::arg("store"), py::arg("ranks"), py::arg("options"),
          py::call_guard<py::gil_scoped_release>())
      .def("_cancel_batch", &DreamBackend::cancel_coalescing,
           py::call_guard<py::gil_scoped_release>())
      .def(
          "_cancel",
          [](const DreamBackend&, const c10::intrusive_ptr<c10d::Work>& receive) {
            if (auto* const message = dynamic_cast<MessageWork*>(receive.get())) message->cancel();
          },
          py::arg("receive"), py::call_guard<py::gil_scoped_release>())
      .def("_place", &DreamBackend::place, py::arg("tensor"),
           py::call_guard<py::gil_scoped_release>())
      .def("_take_placed", &DreamBackend::take_placed, py::arg("source"), py::arg("offset"),
           py::arg("shape"), py::arg("dtype"), py::call_guard<py::gil_scoped_release>())
      .def("stats", &stats_of)
      .def(
          "explain",
          [](const DreamBackend& self, const std::string& op, std::size_t nbytes, bool heap) {
            return self.explain(kind_named(op), nbytes, heap);
          },
          py::arg("op"), py::arg("nbytes"), py::arg("heap") = false)
      .def(
          "monitored_barrier",
          [](DreamBackend& self, std::optional<milliseconds> timeout, bool wait_all_ranks) {
            c10d::BarrierOptions opts;
            if (timeout) opts.timeout = *timeout;
            self.monitoredBarrier(opts, wait_all_ranks);
          },
          py::arg("timeout") = py::none(), py::arg("wait_all_ranks") = false,
          py::call_guard<py::gil_scoped_release>())
      .def(
          "_predict",
          [](const DreamBackend& self, const std::string& op, std::size_t nbytes, bool in_heap) {
            const Prediction prediction = self.predict(kind_named(op), nbytes, in_heap);
            return py::make_tuple(prediction.algorithm, prediction.seconds);
          },
          py::arg("op"), py::arg("nbytes"), py::arg("in_heap"))
      .def(
          "_time_core",
          [](DreamBackend& self, const std::string& op, const at::Tensor& input,
             const at::Tensor& output,
             int samples) { return self.time_core(kind_named(op), input, output, samples); },
          py::arg("op"), py::arg("input"), py::arg("output"), py::arg("samples"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "_time_ceiling",
          [](DreamBackend& self, const std::string& op, const at::Tensor& input,
             const at::Tensor& output,
             int samples) { return self.time_ceiling(kind_named(op), input, output, samples); },
          py::arg("op"), py::arg("input"), py::arg("output"), py::arg("samples"),
          py::call_guard<py::gil_scoped_release>())
      .def("get_error", &DreamBackend::getError)
      .def("_set_default_timeout", &DreamBackend::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace dreamcomm

PYBIND11_MODULE(_C, m) {
  m.doc() = "dreamcomm's compiled part; import torch first.";
  py::module_::import("torch._C._distributed_c10d");  // the classes these derive from
  dreamcomm::bind_interpreter(m);
  dreamcomm::bind_options(m);
  dreamcomm::bind_records(m);
  dreamcomm::bind_between(m);
  dreamcomm::bind_backend(m);
  dreamcomm::bind_messages(m);
  dreamcomm::bind_ops(m);
  dreamcomm::bind_optimizer(m);
  dreamcomm::bind_buckets(m);
  dreamcomm::bind_region(m);
  dreamcomm::bind_units(m);
  dreamcomm::bind_arrays(m);
  dreamcomm::bind_batch_norm(m);
  dreamcomm::bind_replicas(m);
  dreamcomm::bind_registered(m);
  m.def(
      "explain",
      [](const std::string& op, std::size_t nbytes, int world, bool heap) {
        if (world < 1) throw py::value_error("expected a world of at least 1 rank");
        return dreamcomm::explain_world(dreamcomm::kind_named(op), nbytes, world, heap);
      },
      py::arg("op"), py::arg("nbytes"), py::arg("world"), py::arg("heap"));
  m.def("allocate", &dreamcomm::allocate, py::arg("size"), py::arg("dtype"), py::arg("heap_bytes"));
  m.def("give_back_free_pages", &dreamcomm::give_back_free_pages);
  m.def("is_in_heap", &dreamcomm::is_in_heap, py::arg("tensor"));
  m.def("instruction_set", [] { return std::string(dreamcomm::instruction_set()); });
  m.def("usable_cpus", &dreamcomm::usable_cpus);
  m.attr("WINDOW_LABEL") = dreamcomm::kWindowLabel;
  m.attr("PROTOCOL_VERSION") = dreamcomm::kProtocolVersion;
  m.def("observe_rank", &dreamcomm::observe_rank, py::arg("path"));
  m.def("cuda_runtime_version", &dreamcomm::gpu::runtime_version);
  m.def(
      "cuda_devices",
      [] {
        std::string why;
        const int count = dreamcomm::gpu::device_count(why);
        return std::pair(count, why);
      },
      py::call_guard<py::gil_scoped_release>());
}
