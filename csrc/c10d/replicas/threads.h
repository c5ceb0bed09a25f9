// The threads that torch computes an operator with.
#pragma once

namespace dreamcomm {

/// Sets the number of threads of operators that the calling thread runs, and of no others:
/// torch.set_num_threads sets that of MKL, and of threads that start later, in the whole process.
/// Does nothing where torch is built without OpenMP.
void use_threads(int threads);

/// Ends the threads in which the calling thread's operators run; the next operator starts them
/// again. Idle ones spin for some milliseconds, on cores that replicas are about to use.
void end_idle_threads();

}  // namespace dreamcomm
