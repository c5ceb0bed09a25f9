#include "c10d/rendezvous/store_board.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "internode/barrier/monitored_barrier.h"

namespace dreamcomm {
namespace {

/// Pauses before a look: short at first, as the others are mostly quick.
constexpr std::chrono::milliseconds kShortestBetween{1};
constexpr std::chrono::milliseconds kLongestBetween{32};

}  // namespace

/// INVARIANT: at most one look is under way, so its result is newer than the stored one.
struct StoreBoard::Board {
  std::string look(c10d::Store& store) {
    std::vector<std::string> found;
    for (const std::string& key : keys) {
      found.push_back(store.check({key}) ? store.get_to_str(key) : std::string());
    }
    const std::scoped_lock lock(mutex);
    news = true;
    looks = false;
    texts = std::move(found);
    if (ring) ring();
    return "";
  }

  const std::vector<std::string> keys;
  std::mutex mutex;
  std::function<void()> ring;
  std::vector<std::string> texts;
  bool news = true;    // than what was read last
  bool looks = false;  // now, or soon
  std::chrono::milliseconds pause = kShortestBetween;
};

StoreBoard::StoreBoard(std::shared_ptr<StoreWorker> worker, std::vector<std::string> keys,
                       std::function<void()> ring)
    : worker_(std::move(worker)),
      board_(
          new Board{.keys = std::move(keys), .mutex = {}, .ring = std::move(ring), .texts = {}}) {
  board_->texts.resize(board_->keys.size());
}

StoreBoard::~StoreBoard() {
  const std::scoped_lock lock(board_->mutex);
  board_->ring = nullptr;
}

void StoreBoard::post(const std::string& key, const std::string& text) { worker_->post(key, text); }

bool StoreBoard::has_news() {
  const std::scoped_lock lock(board_->mutex);
  return board_->news;
}

std::vector<std::string> StoreBoard::read(std::chrono::milliseconds patience) {
  if (patience.count() > 0) {
    worker_->run([board = board_](c10d::Store& store) { return board->look(store); }, patience);
  }
  const std::scoped_lock lock(board_->mutex);
  board_->pause =
      patience.count() > 0 ? kShortestBetween : std::min(2 * board_->pause, kLongestBetween);
  if (!board_->looks) {
    board_->looks = true;
    worker_->begin([board = board_](c10d::Store& store) { return board->look(store); },
                   board_->pause);
  }
  board_->news = false;
  return board_->texts;
}

std::shared_ptr<BarrierBoard> leaders_board(const std::shared_ptr<StoreWorker>& worker,
                                            const Topology& topology, int rank,
                                            std::function<void()> ring) {
  if (topology.index_of(rank) != 0) return nullptr;
  return std::make_shared<StoreBoard>(worker, InternodeBarrier::keys(topology, rank),
                                      std::move(ring));
}

}  // namespace dreamcomm
