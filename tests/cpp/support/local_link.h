// Messages between threads, as an engine without any buffers would carry them: a send ends when its
// receive has begun.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "transport/link.h"

namespace dreamcomm::testing {

/// What the links of all ranks share.
struct Post {
  struct Item {
    Cargo cargo;
    bool done = false;
    bool interrupted = false;
  };
  using Key = std::tuple<int, int, std::uint32_t>;  // from, to, tag

  using Items = std::map<Key, std::deque<std::shared_ptr<Item>>>;

  std::mutex mutex;
  std::condition_variable changed;
  Items sends;
  Items receives;
  std::vector<bool> closed;
  bool unique = false;  // no two messages of one direction have the same tag
};

/// One for each of `size` ranks. `unique`: no two messages of one direction and tag may be under
/// way.
std::vector<std::unique_ptr<Link>> make_local_links(int size, bool unique);

}  // namespace dreamcomm::testing
