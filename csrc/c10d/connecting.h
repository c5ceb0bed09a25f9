// Connecting the ranks of several hosts through torch's Gloo, which names nobody who does not come.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "c10d/fallback.h"
#include "c10d/spanning.h"
#include "c10d/store.h"
#include "c10d/store_clerk.h"
#include "span/reasons.h"

namespace dreamcomm {

/// A store whose users wait for keys until `patience` from now is over.
StorePtr patient_store(const StorePtr& store, std::chrono::milliseconds patience);

/// What is connected.
struct Connection {
  Place place;
  std::string carries;             // "calls" or "messages"
  std::chrono::milliseconds time;  // that it takes where one does not come
  const std::function<void()>& interrupt;
  Clock::time_point begin = Clock::now();
};

/// What `connect` returns, which makes `connection`. Where it throws Error, the others are told
/// why, and with it is thrown what is known of them. INVARIANT: the ranks have met just before, and
/// each says when it has connected or failed; so of whom nothing is heard a moment after the time
/// is over has been held up, or has ended. (Gloo waits for one rank after the other: with several
/// late ones it may take longer.)
Fallback::Inner connect_hosts(const Connection& connection, StoreClerk& clerk,
                              const Reasons& reasons,
                              const std::function<Fallback::Inner()>& connect);

/// The first thing that is done with what connect_hosts() returned; where it throws Error, with it
/// is thrown of whom nothing is heard. Others' words do not do: one that could not connect tells so
/// at once, and only later, when it has listened, with whom.
void first_use(const Connection& connection, StoreClerk& clerk, const Reasons& reasons,
               const std::function<void()>& use);

/// Gloo's words: the first line, without where in its sources it found them.
std::string words_of_gloo(const std::string& text);

}  // namespace dreamcomm
