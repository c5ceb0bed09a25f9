#include "c10d/python/module_messages.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c10d/backend/backend.h"
#include "c10d/base/convert.h"
#include "c10d/base/gil_signals.h"
#include "c10d/messages/header_channel.h"
#include "c10d/messages/placed_message.h"

namespace dreamcomm {
namespace {

namespace py = pybind11;
using Keys = std::array<std::int64_t, KeyedHeader::kKeys>;

/// Runs `call` without the GIL. Throws its errors as torch's kinds.
template <typename Call>
std::invoke_result_t<Call> run_released(Call&& call) {
  const py::gil_scoped_release release;
  try {
    return call();
  } catch (const Error& error) {
    std::rethrow_exception(to_torch(error));
  }
}

std::unique_ptr<HeaderChannel> make_channel(const c10::intrusive_ptr<DreamBackend>& backend,
                                            int tag) {
  std::shared_ptr<MessageCarrier> carrier(backend.get(), [backend](MessageCarrier*) {});
  return std::make_unique<HeaderChannel>(std::move(carrier), tag);
}

bool send(HeaderChannel& channel, int peer, const Keys& key, const py::bytes& description,
          std::vector<std::int64_t> offsets) {
  KeyedHeader header;
  header.key = key;
  std::string text = description;
  header.size = static_cast<std::uint32_t>(text.size());
  const bool inside = KeyedHeader::fits(text.size(), offsets.size());
  if (inside) header.description = std::move(text);
  header.offsets = std::move(offsets);
  run_released([&] { channel.send(peer, header); });
  return inside;
}

/// None, or (sender, key, description or its size where it follows, offsets).
py::object next(HeaderChannel& channel, int milliseconds) {
  const std::optional<std::pair<int, KeyedHeader>> found = run_released(
      [&] { return channel.next(std::chrono::milliseconds(milliseconds), check_signals); });
  if (!found) return py::none();
  const KeyedHeader& header = found->second;
  const bool inside = header.description.size() == header.size;
  py::object text =
      inside ? py::object(py::bytes(header.description)) : py::object(py::int_(header.size));
  return py::make_tuple(found->first, py::tuple(py::cast(header.key)), std::move(text),
                        py::tuple(py::cast(header.offsets)));
}

}  // namespace

void bind_messages(py::module_& m) {
  py::class_<PlacedMessage>(m, "PlacedMessage",
                            "A tensor of a message in the sender's heap, until it is taken.")
      .def_property_readonly("offset", &PlacedMessage::offset)
      .def_property_readonly("nbytes", &PlacedMessage::bytes)
      .def_property_readonly("taken", &PlacedMessage::taken);
  py::class_<HeaderChannel>(m, "HeaderChannel", "Short messages with a key, from all peers.")
      .def(py::init(&make_channel), py::arg("backend"), py::arg("tag"))
      .def_static("fits", &KeyedHeader::fits, py::arg("description"), py::arg("offsets"))
      .def("send", &send, py::arg("peer"), py::arg("key"), py::arg("description"),
           py::arg("offsets"))
      .def("next", &next, py::arg("milliseconds"))
      .def("pending",
           [](HeaderChannel& channel) { return run_released([&] { return channel.pending(); }); })
      .def("cancel", &HeaderChannel::cancel, py::call_guard<py::gil_scoped_release>());
}

}  // namespace dreamcomm
