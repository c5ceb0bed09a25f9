// Use of a store that may be out of reach: by a thread of its own, for which nobody waits without
// end.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace dreamcomm {

/// INVARIANT: a thread that calls never is in the store itself, nor waits for its lock: a TCPStore
/// waits without end for the answer of a host that has vanished, and holds its lock meanwhile. So
/// the clerk has a connection of its own, made when it is greeted or the first job comes, and
/// nobody waits longer for it than he likes. Once one has waited in vain nobody waits again, until
/// it answers: the next ones would only add their patience to his.
class StoreWorker {
 public:
  using Job = std::function<std::string(c10d::Store&)>;

  explicit StoreWorker(c10::intrusive_ptr<c10d::Store> store);
  /// As leave().
  ~StoreWorker();
  StoreWorker(const StoreWorker&) = delete;
  StoreWorker& operator=(const StoreWorker&) = delete;

  /// What `job` returned, if it did within `patience` and threw nothing. Jobs are done in the order
  /// given, also those that nobody waits for any more, so a job must own what it uses. Any thread.
  std::optional<std::string> run(Job job, std::chrono::milliseconds patience);
  /// Likewise, but waits for nothing. After `pause`, in which others are done; not at all if this
  /// goes meanwhile.
  void begin(Job job, std::chrono::milliseconds pause = {});

  /// Takes no more orders. Leaves the thread alone where the store keeps it, but for long in one
  /// that may be written in Python, which must not be in use when the interpreter ends.
  void leave();

  /// For the answers of a store that is there, and the longest for one that is far away.
  static constexpr std::chrono::milliseconds kPatience{300};
  static constexpr std::chrono::milliseconds kLongestPatience{2000};
  /// What is under the key, "" for nothing, if the store says so within its patience.
  std::optional<std::string> read(const std::string& key);
  /// It grows with the time that the quicker one of the last two answers took: a key that is there
  /// takes a TCPStore three round trips, one that is not takes one.
  std::chrono::milliseconds patience() const;
  /// Connects meanwhile, and learns by two answers how far the store is.
  void greet();
  /// Puts a text there, for which post() does not wait, and set() as long.
  void post(const std::string& key, const std::string& text);
  void set(const std::string& key, const std::string& text);

 private:
  struct State;
  bool hire();
  Job looking(const std::string& key) const;

  const std::shared_ptr<State> state_;  // the thread's, too
};

}  // namespace dreamcomm
