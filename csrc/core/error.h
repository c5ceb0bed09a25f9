// One exception type. `kind` says which side has to act: the caller, or the group.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace dreamcomm {

enum class ErrorKind {
  kInvalid,      // a bad argument; nothing was sent, the group stays usable
  kMismatch,     // the ranks made different calls; the group stays usable
  kTimeout,      // a deadline passed; the group is unusable
  kPeerLost,     // a rank died or left; the group is unusable
  kAborted,      // abort() or an earlier failure of this group
  kInterrupted,  // the waiting thread was asked to stop (Ctrl-C)
  kSystem,       // the operating system refused something
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

/// Throws an Error of `kind` made of `parts` unless `condition` holds.
template <typename... Parts>
void check(bool condition, ErrorKind kind, const Parts&... parts) {
  if (!condition) [[unlikely]] {
    throw Error(kind, concat(parts...));
  }
}

}  // namespace dreamcomm
