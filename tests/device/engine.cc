#include "engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "memory.h"

namespace dreamcomm::testing {
namespace {

constexpr std::chrono::seconds kLongest{20};

/// wait() orders the current stream after the work; the host does not wait.
class EngineWork final : public c10d::Work {
 public:
  explicit EngineWork(Mark done) : done_(std::move(done)) {}
  bool isCompleted() override { return done_.passed(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    done_.block(queue_of(current_stream()));
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }

 private:
  Mark done_;
};

/// Each has a thread for the life of the process, as other streams have.
Queue& new_queue() { return *new Queue; }

}  // namespace

template <typename Done>
void Board::wait(std::unique_lock<std::mutex>& lock, const char* what, const Done& done) {
  const auto ends = [&] { return !failure_.empty() || done(); };
  if (!changed_.wait_for(lock, kLongest, ends)) failure_ = what;
  changed_.notify_all();
}

bool Board::take(int rank, const Message& message) {
  auto& row = sent_[{message.rank, rank}];
  if (row.empty()) return false;
  SentMessage& sent = *row.front();
  if (sent.memory.nbytes() == message.memory.nbytes()) {
    std::memcpy(message.memory.mutable_data_ptr(), sent.memory.const_data_ptr(),
                message.memory.nbytes());
  } else {
    failure_ = "a message has " + std::to_string(sent.memory.nbytes()) + " bytes, and room is " +
               std::to_string(message.memory.nbytes());
  }
  sent.taken = true;
  row.pop_front();
  changed_.notify_all();
  return true;
}

void Board::exchange(int rank, const std::vector<Message>& messages) {
  std::unique_lock lock(mutex_);
  std::vector<std::shared_ptr<SentMessage>> sent;
  std::vector<Message> expected;
  for (const Message& one : messages) {
    if (!one.sends) {
      expected.push_back(one);
      continue;
    }
    sent.push_back(std::make_shared<SentMessage>(SentMessage{one.memory}));
    sent_[{rank, one.rank}].push_back(sent.back());
    ++messages_;
    bytes_ += static_cast<std::int64_t>(one.memory.nbytes());
  }
  changed_.notify_all();
  wait(lock, "messages have no other end", [&] {
    std::erase_if(expected, [&](const Message& one) { return take(rank, one); });
    return expected.empty() &&
           std::all_of(sent.begin(), sent.end(), [](const auto& one) { return one->taken; });
  });
}

std::int64_t Board::greatest(int ranks, std::uint64_t call, std::int64_t mine) {
  std::unique_lock lock(mutex_);
  Reduction& reduction = reductions_[call];
  ++reduction.arrived;
  reduction.greatest = std::max(reduction.greatest, mine);
  changed_.notify_all();
  wait(lock, "ranks have not entered an all_reduce", [&] { return reduction.arrived == ranks; });
  return reduction.greatest;
}

void Board::abort() {
  const std::scoped_lock lock(mutex_);
  if (failure_.empty()) failure_ = "aborted";
  changed_.notify_all();
}

std::string Board::failure() const {
  const std::scoped_lock lock(mutex_);
  return failure_;
}

std::pair<std::int64_t, std::int64_t> Board::traffic() const {
  const std::scoped_lock lock(mutex_);
  return {messages_, bytes_};
}

Engine::Engine(std::shared_ptr<Board> board, int rank, int size)
    : Backend(rank, size), board_(std::move(board)), queue_(new_queue()) {}

/// Runs the task after the current stream's work so far.
Engine::WorkPtr Engine::put(std::function<void()> task) {
  Mark before;
  before.record(queue_of(current_stream()));
  before.block(queue_);
  queue_.put(std::move(task));
  Mark done;
  done.record(queue_);
  return c10::make_intrusive<EngineWork>(std::move(done));
}

Engine::WorkPtr Engine::endCoalescing() {
  together_ = false;
  return put([board = board_, rank = rank_, messages = std::exchange(messages_, {})] {
    board->exchange(rank, messages);
  });
}

Engine::WorkPtr Engine::message(int rank, const at::Tensor& tensor, bool sends) {
  messages_.push_back({rank, on_host(tensor), sends});
  return together_ ? nullptr : endCoalescing();
}

Engine::WorkPtr Engine::send(std::vector<at::Tensor>& tensors, int to, int) {
  return message(to, tensors.at(0), true);
}

Engine::WorkPtr Engine::recv(std::vector<at::Tensor>& tensors, int from, int) {
  return message(from, tensors.at(0), false);
}

Engine::WorkPtr Engine::allreduce(std::vector<at::Tensor>& tensors,
                                  const c10d::AllreduceOptions& options) {
  TORCH_CHECK(options.reduceOp == c10d::ReduceOp::MAX && tensors.at(0).numel() == 1);
  WorkPtr work = put([board = board_, size = size_, call = calls_++, word = on_host(tensors[0])] {
    auto& number = *word.mutable_data_ptr<std::int64_t>();
    number = board->greatest(size, call, number);
  });
  if (options.asyncOp) return work;
  work->wait();
  return nullptr;
}

}  // namespace dreamcomm::testing
