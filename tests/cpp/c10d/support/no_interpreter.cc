// What c10d/python/gil_signals.cc defines, for a program without a Python interpreter.
#include "c10d/base/gil_signals.h"

namespace dreamcomm {

void check_signals() {}

bool is_foreign(const std::exception&) { return false; }

void without_gil(const std::function<void()>& wait) { wait(); }

}  // namespace dreamcomm
