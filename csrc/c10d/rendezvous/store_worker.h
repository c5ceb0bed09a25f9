// A thread that uses a store for others, so that none of them blocks in a store out of reach.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace dreamcomm {

/// INVARIANT: callers never block in the store, nor wait for its lock: a TCPStore waits without end
/// for the answer of a host that has vanished, and holds its lock meanwhile. So requests run on a
/// worker with its own connection, made by greet() or at the first job, and callers wait for their
/// patience at most. After one timeout callers fail fast until the store answers again: otherwise
/// each would add its patience to the last one's.
class StoreWorker {
 public:
  using Job = std::function<std::string(c10d::Store&)>;

  explicit StoreWorker(c10::intrusive_ptr<c10d::Store> store);
  /// As leave().
  ~StoreWorker();
  StoreWorker(const StoreWorker&) = delete;
  StoreWorker& operator=(const StoreWorker&) = delete;

  /// Returns the result of `job`, if it ended within `patience` and threw nothing. Jobs run in the
  /// order given, also after their callers stopped waiting, so a job must own what it uses. Any
  /// thread.
  std::optional<std::string> run(Job job, std::chrono::milliseconds patience);
  /// Likewise, but waits for nothing. Runs after `pause`, in which other jobs may run; not at all
  /// if this is destroyed meanwhile.
  void begin(Job job, std::chrono::milliseconds pause = {});

  /// Takes no more jobs. Does not wait for a thread that the store blocks, except, for a while, in
  /// a store that may be written in Python: none may be in use when the interpreter ends.
  void leave();

  /// The patience with a store nearby, and the longest, with one far away.
  static constexpr std::chrono::milliseconds kPatience{300};
  static constexpr std::chrono::milliseconds kLongestPatience{2000};
  /// The key's value, "" for none, if the store answers within the patience.
  std::optional<std::string> read(const std::string& key);
  /// Grows with the time of the quicker one of the last two answers: a TCPStore takes three
  /// round trips for a key that exists, and one for a missing key.
  std::chrono::milliseconds patience() const;
  /// Connects in the background, and measures by two answers how far the store is.
  void greet();
  /// Puts a text there. post() does not wait for it, set() does, for the patience.
  void post(const std::string& key, const std::string& text);
  void set(const std::string& key, const std::string& text);

 private:
  struct State;
  bool hire();
  Job looking(const std::string& key) const;

  const std::shared_ptr<State> state_;  // the thread's, too
};

}  // namespace dreamcomm
