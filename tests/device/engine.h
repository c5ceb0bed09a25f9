// Carries messages between the tests' devices, whose ranks are threads, as NCCL does: in the order
// of its own stream, the messages of one group together. Each waits for its other end.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "streams.h"

namespace dreamcomm::testing {

/// The state that the engines of a test's ranks share.
class Board {
 public:
  struct SentMessage {
    at::Tensor memory;  // of the host
    bool taken = false;
  };
  struct Message {
    int rank;
    at::Tensor memory;
    bool sends;
  };
  /// Returns when all messages of a rank have been matched.
  void exchange(int rank, const std::vector<Message>& messages);
  /// The greatest of all ranks' `mine` in their calls of that number.
  std::int64_t greatest(int ranks, std::uint64_t call, std::int64_t mine);
  void abort();
  /// What went wrong, or "".
  std::string failure() const;
  /// Messages so far, and their bytes.
  std::pair<std::int64_t, std::int64_t> traffic() const;

 private:
  struct Reduction {
    int arrived = 0;
    std::int64_t greatest = 0;
  };
  bool take(int rank, const Message& message);
  template <typename Done>
  void wait(std::unique_lock<std::mutex>& lock, const char* what, const Done& done);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // By sender and receiver.
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<SentMessage>>> sent_;
  std::map<std::uint64_t, Reduction> reductions_;  // by number of the call
  std::string failure_;
  std::int64_t messages_ = 0;
  std::int64_t bytes_ = 0;
};

class Engine final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  Engine(std::shared_ptr<Board> board, int rank, int size);

  const std::string getBackendName() const override { return "engine"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { together_ = true; }
  WorkPtr endCoalescing() override;
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  /// MAX of one number.
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) override;
  void abort() override { board_->abort(); }
  void shutdown() override {}

 private:
  WorkPtr put(std::function<void()> task);
  WorkPtr message(int rank, const at::Tensor& tensor, bool sends);

  const std::shared_ptr<Board> board_;
  Queue& queue_;
  bool together_ = false;
  std::vector<Board::Message> messages_;
  std::uint64_t calls_ = 0;
};

}  // namespace dreamcomm::testing
