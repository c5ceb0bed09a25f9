// Messages between ranks that share no memory. One subclass per engine that carries them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace dreamcomm {

/// Memory that a message is read from or written to. Its owner lives until the engine is done with
/// it, even if the call that sent it has failed.
struct Cargo {
  std::shared_ptr<std::byte> memory;
  std::size_t offset = 0;
  std::size_t bytes = 0;
  std::byte* data() const { return memory.get() + offset; }
};

/// A message under way.
class Parcel {
 public:
  Parcel() = default;
  virtual ~Parcel() = default;
  Parcel(const Parcel&) = delete;
  Parcel& operator=(const Parcel&) = delete;

  /// Waits until the memory may be used again and returns true. Returns false after interrupt():
  /// the message is still under way, and may be waited for again. Throws Error(kPeerLost). One
  /// thread.
  virtual bool wait() = 0;
  /// Ends a running wait(), or the next one at once, unless the message has arrived. Any thread.
  virtual void interrupt() = 0;
};

class Link {
 public:
  Link() = default;
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  /// Both begin at once. The n-th receive from a rank under `tag` gets that rank's n-th send under
  /// `tag`; a receiver may have room for more. Any thread. Throws Error(kPeerLost).
  virtual std::shared_ptr<Parcel> send(int rank, const Cargo& cargo, std::uint32_t tag) = 0;
  virtual std::shared_ptr<Parcel> receive(int rank, const Cargo& cargo, std::uint32_t tag) = 0;
  static constexpr std::uint32_t kMostTag = 0x7fffffff;

  /// Aborts what is under way; the other ranks notice. Any thread.
  virtual void close() = 0;
  /// "Gloo" and the like.
  virtual std::string describe() const = 0;
};

}  // namespace dreamcomm
