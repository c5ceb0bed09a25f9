// Random numbers of a thread's own: torch has one generator of CPU numbers for all threads.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>

namespace dreamcomm {

/// Gives operators of this thread a generator for CPU numbers, within its scope, where they are
/// given none; also operators that others call. Without a generator it changes nothing.
///
/// It is a mode above autograd. torch's dispatcher skips it for operators without a generator
/// argument, so these are as fast as before. Tensor subclasses and traced graphs are left alone.
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

/// Sets a generator's state to `before`, if it is `now`. Returns whether it was.
bool rewind(const at::Generator& generator, const at::Tensor& now, const at::Tensor& before);

/// The generator of this thread's innermost scope.
const std::optional<at::Generator>& thread_generator();

}  // namespace dreamcomm
