// Runs a function as every rank of a group: as threads (local) or processes (shm).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "transport/shm/heap.h"

namespace dreamcomm::testing {

enum class Transport { kLocal, kShm };

struct Setup {
  Transport transport = Transport::kLocal;
  int size = 2;
  std::size_t page_bytes = std::size_t{64} << 10;
  std::size_t message_bytes = 4096;
  std::uint32_t start = 0;  // of the counters; local only
  int delays = 0;           // per mille of calls of `pause` that sleep a little
  CommOptions comm{};
  std::size_t heap_bytes = 0;  // of each rank's heap; 0: none
};

std::ostream& operator<<(std::ostream& out, const Setup& setup);

/// Runs `body` as every rank and waits for all. Throws with every failed rank's
/// text if a body threw. A rank that ends its process early counts as failed
/// unless its number is in `may_die`.
void run_ranks(const Setup& setup, const std::function<void(Communicator&)>& body,
               const std::vector<int>& may_die = {});

/// The transports this build can test: processes confuse ThreadSanitizer.
std::vector<Transport> transports();

/// The smallest page a group of this size takes: many chunks for few bytes.
std::size_t tiny_page(int size);

/// The heap of the rank whose body runs on this thread, or null.
Heap* own_heap();

/// Sleeps for a random while now and then (thread-safe).
void pause(int per_mille);

/// Throws std::runtime_error with the text unless the condition holds.
void require(bool condition, const std::string& text);

}  // namespace dreamcomm::testing
