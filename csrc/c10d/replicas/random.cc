#include "c10d/replicas/random.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/equal.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace dreamcomm {
namespace {

// torch keeps this key for modes of other libraries, and uses it nowhere itself.
constexpr c10::DispatchKey kMode = c10::DispatchKey::DeferredInit;

thread_local std::optional<at::Generator> current;

bool takes_generator(const c10::Argument& argument) {
  const auto* const type = argument.type()->castRaw<c10::OptionalType>();
  return type != nullptr && type->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

/// A plain tensor on a CPU, a CPU as the device, or no tensor and no device at all.
bool leaves_on_cpu(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.is_cpu() && !tensor.key_set().has(c10::DispatchKey::Python);
  }
  return !value.isDevice() || value.toDevice().is_cpu();
}

void draw(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(kMode);
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  if (current && !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
      std::all_of(values.begin(), values.end(), leaves_on_cpu)) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = (*stack)[stack->size() - arguments.size() + i];
      if (takes_generator(arguments[i]) && value.isNone()) value = *current;
    }
  }
  op.callBoxed(stack);
}

/// Registers the mode, once a process: for all operators it is skipped, unless they draw numbers.
bool install() {
  using torch::Library;
  static Library all(Library::IMPL, "_", kMode, __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFallthrough());
  static Library drawing(Library::IMPL, "aten", kMode, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != std::optional<c10::string_view>("aten")) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    const auto& arguments = op->schema().arguments();
    if (!std::any_of(arguments.begin(), arguments.end(), takes_generator)) continue;
    const std::string full = toString(name).substr(std::string_view("aten::").size());
    drawing.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&draw>());
  }
  return true;
}

}  // namespace

ThreadRandom::ThreadRandom(const std::optional<at::Generator>& generator)
    : outer_(current), outer_mode_(c10::impl::tls_is_dispatch_key_included(kMode)) {
  if (!generator) return;
  static const bool installed = install();
  (void)installed;
  current = generator;
  c10::impl::tls_set_dispatch_key_included(kMode, true);
}

ThreadRandom::~ThreadRandom() {
  current = std::move(outer_);
  c10::impl::tls_set_dispatch_key_included(kMode, outer_mode_);
}

bool rewind(const at::Generator& generator, const at::Tensor& now, const at::Tensor& before) {
  at::Generator source = generator;
  const std::lock_guard<std::mutex> lock(source.mutex());
  if (!source.get_state().equal(now)) return false;
  source.set_state(before);
  return true;
}

const std::optional<at::Generator>& thread_generator() { return current; }

}  // namespace dreamcomm
