// A board in the store, on which the leaders of hosts post for each other.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "c10d/rendezvous/store_worker.h"
#include "internode/barrier/board.h"
#include "transport/topology.h"

namespace dreamcomm {

class StoreBoard final : public BarrierBoard {
 public:
  /// Reads `keys`. `ring` wakes the rank; any thread.
  StoreBoard(std::shared_ptr<StoreWorker> worker, std::vector<std::string> keys,
             std::function<void()> ring);
  /// No longer wakes the rank.
  ~StoreBoard() override;

  void post(const std::string& key, const std::string& text) override;
  bool has_news() override;
  std::vector<std::string> read(std::chrono::milliseconds patience) override;

 private:
  struct Board;
  const std::shared_ptr<StoreWorker> worker_;
  const std::shared_ptr<Board> board_;  // shared with the worker
};

/// For a monitored barrier between hosts; null on ranks that lead none.
std::shared_ptr<BarrierBoard> leaders_board(const std::shared_ptr<StoreWorker>& worker,
                                            const Topology& topology, int rank,
                                            std::function<void()> ring);

}  // namespace dreamcomm
