// Messages between threads, as an engine without any buffers would carry them: a send ends when
// its receive has begun.
#pragma once

#include <condition_variable>
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

  std::mutex mutex;
  std::condition_variable changed;
  std::map<Key, std::shared_ptr<Item>> sends;
  std::map<Key, std::shared_ptr<Item>> receives;
  std::vector<bool> closed;
};

/// One for each of `size` ranks.
std::vector<std::unique_ptr<Link>> make_local_links(int size);

}  // namespace dreamcomm::testing
