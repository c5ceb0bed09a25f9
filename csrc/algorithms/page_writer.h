// Writes pages in the way that has been the faster one lately.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace dreamcomm {

/// A page that is written again is still held by the caches of those who read it.
/// Where the cores share a cache, taking its lines back costs little; where they do
/// not (two sockets, two dies of a server, a virtual machine whose cores the host
/// has moved apart) it takes ten times as long as to write past the caches, 430
/// nanoseconds a KiB instead of 40 on one server. Which is the case can change while
/// a program runs. So each rank times some of its own writes, and now and then one
/// in the other way. Readers see no difference: it is no matter of the algorithm,
/// and no bit of a result depends on it.
///
/// Not thread-safe: one call of a group runs at a time.
class PageWriter {
 public:
  void write(std::byte* to, const std::byte* from, std::size_t bytes);

  std::uint64_t writes() const { return writes_; }      // of a size that leaves the choice
  std::uint64_t streamed() const { return streamed_; }  // of these, past the caches

 private:
  struct Way {
    double cost = 0;  // nanoseconds per byte, smoothed; 0: not known yet
    void learn(double sample);
  };
  /// Writes of similar size.
  struct SizeClass {
    std::uint32_t count = 0;
    Way plain;
    Way past;
    bool prefers_past() const;
  };

  std::array<SizeClass, 10> classes_;
  std::uint64_t writes_ = 0;
  std::uint64_t streamed_ = 0;
};

}  // namespace dreamcomm
