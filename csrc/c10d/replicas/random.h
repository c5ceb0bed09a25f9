// Random numbers of a thread's own: torch has one generator of CPU numbers for all threads.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace dreamcomm {

/// Within its scope, operators of this thread that are given no generator draw CPU numbers from this
/// one, also those that other operators call. Without a generator it changes nothing.
///
/// A mode above autograd does it: torch's dispatcher skips it for all operators without a generator
/// argument, so these are as fast as before. Tensor subclasses and graphs being traced are left alone.
class ThreadRandom {
 public:
  explicit ThreadRandom(const std::optional<at::Generator>& generator);
  ThreadRandom(const ThreadRandom&) = delete;
  ThreadRandom& operator=(const ThreadRandom&) = delete;
  ~ThreadRandom();

 private:
  std::optional<at::Generator> outer_;
  bool outer_mode_;
};

/// The generator of this thread's innermost scope.
const std::optional<at::Generator>& thread_generator();

}  // namespace dreamcomm
