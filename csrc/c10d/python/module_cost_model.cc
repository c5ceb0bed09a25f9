#include "c10d/python/module_cost_model.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "c10d/base/convert.h"
#include "c10d/rendezvous/deadline_store.h"
#include "internode/cost/model.h"

namespace dreamcomm {
namespace {

constexpr std::size_t kSizes = Corrections::kSizes.size();
/// latency, message, alone, byte, chunk, handling, overlap; then the corrections of leaders, and of
/// carriers.
constexpr std::size_t kPlain = 7;
using Wire = std::array<double, kPlain + 2 * kSizes>;
using Ways = std::vector<std::tuple<bool, std::size_t, double>>;

std::string even_costs(double turn, double byte) {
  Costs costs;
  costs.turn = turn;
  for (Costs::Rates& rates : costs.rates) rates.fill(byte);
  return to_text(costs);
}

Shape shape_of(const std::vector<int>& ranks_on) {
  TORCH_CHECK_VALUE(!ranks_on.empty() && *std::min_element(ranks_on.begin(), ranks_on.end()) > 0,
                    "expected one host at least, and a rank on each");
  return Shape(ranks_on);
}

LevelCosts costs_of(const std::string& here, const Wire& wire) {
  const std::optional<Costs> costs = from_text(here);
  TORCH_CHECK_VALUE(costs, "expected costs as text, as even_costs() writes them");
  WireCosts between{wire[0], wire[1], wire[2], wire[3], wire[4], wire[5], wire[6], {}, {}};
  std::copy_n(wire.begin() + kPlain, kSizes, between.by_leaders.factors.begin());
  std::copy_n(wire.begin() + kPlain + kSizes, kSizes, between.by_carriers.factors.begin());
  return {*costs, between};
}

/// The way that is taken comes first.
Ways predict_between(const std::string& op, std::size_t nbytes, const std::vector<int>& ranks_on,
                     const std::string& here, const Wire& wire) {
  const Shape shape = shape_of(ranks_on);
  const LevelCosts costs = costs_of(here, wire);
  const Kind kind = kind_named(op);
  TORCH_CHECK_VALUE(kind != Kind::kSend && kind != Kind::kRecv, "no time is predicted for ", op);
  const Way taken = best_way(kind, nbytes, shape, costs);
  Ways found{{taken.leaders, taken.chunk, taken.seconds}};
  for (const Way& way : ways(kind, nbytes, shape, costs)) {
    if (way != taken) found.emplace_back(way.leaders, way.chunk, way.seconds);
  }
  return found;
}

double predict_flat_ring(std::size_t nbytes, const std::vector<int>& ranks_on,
                         const std::string& here, const Wire& wire) {
  return flat_ring(nbytes, shape_of(ranks_on), costs_of(here, wire));
}

}  // namespace

py::object level_costs_of(const DreamBackend& backend) {
  const std::optional<LevelCosts> costs = backend.level_costs();
  if (!costs) return py::none();
  const WireCosts& wire = costs->between;
  Wire numbers{wire.latency, wire.message,  wire.alone,  wire.byte,
               wire.chunk,   wire.handling, wire.overlap};
  std::copy_n(wire.by_leaders.factors.begin(), kSizes, numbers.begin() + kPlain);
  std::copy_n(wire.by_carriers.factors.begin(), kSizes, numbers.begin() + kPlain + kSizes);
  return py::make_tuple(to_text(costs->here), numbers);
}

void bind_between(py::module_& m) {
  py::class_<DeadlineStore, c10d::Store, c10::intrusive_ptr<DeadlineStore>>(m, "DeadlineStore")
      .def("trouble", &DeadlineStore::trouble, py::call_guard<py::gil_scoped_release>())
      .def("leave", &DeadlineStore::leave);

  m.def("even_costs", &even_costs, py::arg("turn"), py::arg("byte"));
  m.def("predict_between", &predict_between, py::arg("op"), py::arg("nbytes"), py::arg("ranks_on"),
        py::arg("here"), py::arg("wire"));
  m.def("predict_flat_ring", &predict_flat_ring, py::arg("nbytes"), py::arg("ranks_on"),
        py::arg("here"), py::arg("wire"));
}

}  // namespace dreamcomm
