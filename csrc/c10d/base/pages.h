// Memory that malloc keeps although nothing is in it.
#pragma once

namespace dreamcomm {

/// Gives all free pages of malloc back to the system, where it is glibc's. For the moments when as
/// much was freed as a model has; some milliseconds.
void give_back_free_pages();

}  // namespace dreamcomm
