// Something that all groups of a process share, as long as one of them holds it.
#pragma once

#include <memory>
#include <mutex>

#include "c10d/process/fork_guard.h"

namespace dreamcomm {

/// A forked child begins without what its parent has: that belongs to the parent's groups. Any
/// thread may call any function.
template <typename T>
class ProcessSingleton {
 public:
  /// The one there is, or null.
  std::shared_ptr<T> get() const {
    const std::scoped_lock lock(mutex_);
    return live();
  }
  void set(const std::shared_ptr<T>& one) {
    const std::scoped_lock lock(mutex_);
    keep(one);
  }
  /// The one there is, or what `make` gives, which may be null.
  template <typename Make>
  std::shared_ptr<T> get_or(Make&& make) {
    const std::scoped_lock lock(mutex_);
    std::shared_ptr<T> one = live();
    if (!one && (one = make())) keep(one);
    return one;
  }

 private:
  std::shared_ptr<T> live() const { return maker_ && maker_->at_home() ? one_.lock() : nullptr; }
  void keep(const std::shared_ptr<T>& one) {
    one_ = one;
    if (!maker_ || !maker_->at_home()) maker_ = std::make_unique<ForkGuard>();
  }

  mutable std::mutex mutex_;
  std::weak_ptr<T> one_;
  std::unique_ptr<ForkGuard> maker_;
};

}  // namespace dreamcomm
