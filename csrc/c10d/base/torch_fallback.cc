#include "c10d/base/torch_fallback.h"

#include <utility>

namespace dreamcomm {

Fallback::Inner Fallback::get(const std::string& device_type) {
  const std::scoped_lock making(making_);
  {
    const std::scoped_lock lock(mutex_);
    const auto found = made_.find(device_type);
    if (found != made_.end()) return found->second;
    TORCH_CHECK_WITH(DistBackendError, !closed_,
                     "this dreamcomm group was shut down; make a new one with new_group()");
  }
  Inner inner = factory_(device_type);
  const std::scoped_lock lock(mutex_);
  made_[device_type] = inner;
  return inner;
}

void Fallback::set(const std::string& device_type, Inner inner) {
  const std::scoped_lock lock(mutex_);
  made_[device_type] = std::move(inner);
}

std::vector<Fallback::Inner> Fallback::all() const {
  const std::scoped_lock lock(mutex_);
  std::vector<Inner> inners;
  for (const auto& [device_type, inner] : made_) inners.push_back(inner);
  return inners;
}

std::vector<Fallback::Inner> Fallback::close() {
  std::vector<Inner> inners = all();
  const std::scoped_lock lock(mutex_);
  closed_ = true;
  factory_ = nullptr;
  made_.clear();
  return inners;
}

namespace {

template <typename Backend>
void pass_on(Backend& inner, std::chrono::milliseconds timeout) {
  if constexpr (requires { inner.setTimeout(timeout); }) inner.setTimeout(timeout);
}

}  // namespace

void set_timeout_of(c10d::Backend& inner, std::chrono::milliseconds timeout) {
  pass_on(inner, timeout);
}

}  // namespace dreamcomm
