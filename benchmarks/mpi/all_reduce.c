/* Times MPI_Allreduce (float32, MPI_SUM) the way dreamcomm's core is timed: see versus_mpi.py.
 *
 *   mpirun -n 2 all_reduce SAMPLES IN_PLACE BYTES...
 *
 * A sample rewrites its rows, passes a barrier, and then times one call on each row. Rows: as many
 * as fit 256 KiB, 1 to 16, so that short calls are not timed right behind a barrier only. Rank 0
 * prints one line of JSON for each size: microseconds of a call on its slowest rank.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BURST_BYTES = 256 << 10, LONGEST_BURST = 16, FILL = 0x3f };

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void *allocate(size_t bytes) {
  void *memory = NULL;
  if (posix_memalign(&memory, 128, bytes) != 0) {
    fprintf(stderr, "all_reduce: no memory for %zu bytes\n", bytes);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return memory;
}

static void die(const char *message) {
  fprintf(stderr, "all_reduce: %s\n", message);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static int burst_of(size_t bytes) {
  const size_t rows = BURST_BYTES / bytes;
  return rows < 1 ? 1 : rows > LONGEST_BURST ? LONGEST_BURST : (int)rows;
}

/* Seconds of `samples` x `burst` calls. Row i of `in` and `out` begins `bytes` after row i - 1. */
static void time_calls(char *in, char *out, size_t bytes, int burst, int samples, double *seconds) {
  const int count = (int)(bytes / sizeof(float));
  for (int sample = 0; sample < samples; ++sample) {
    memset(in, FILL, bytes * (size_t)burst);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int row = 0; row < burst; ++row) {
      char *from = in + bytes * (size_t)row, *to = out + bytes * (size_t)row;
      const double begin = MPI_Wtime();
      MPI_Allreduce(in == out ? MPI_IN_PLACE : from, to, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      seconds[sample * burst + row] = MPI_Wtime() - begin;
    }
  }
}

/* Every element of the last sample is the ranks' sum; sums of up to 2^24 equal floats are exact. */
static void verify(const char *out, size_t bytes, int burst) {
  float one, sum;
  int ranks;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  memset(&one, FILL, sizeof one);
  for (size_t at = 0; at < bytes * (size_t)burst; at += sizeof sum) {
    memcpy(&sum, out + at, sizeof sum);
    const float error = sum / (one * (float)ranks) - 1.0F;
    if (error > 1e-6F || error < -1e-6F) die("a wrong sum");
  }
}

static void measure(size_t bytes, int samples, int in_place) {
  const int burst = burst_of(bytes);
  const int calls = samples * burst;
  char *in = allocate(bytes * (size_t)burst);
  char *out = in_place ? in : allocate(bytes * (size_t)burst);
  double *mine = allocate(sizeof(double) * (size_t)calls);
  double *slowest = allocate(sizeof(double) * (size_t)calls);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  memset(out, 0, bytes * (size_t)burst);
  const int warmup = samples < 5 ? 1 : samples / 5;
  time_calls(in, out, bytes, burst, warmup, mine);
  time_calls(in, out, bytes, burst, samples, mine);
  verify(out, bytes, burst);
  MPI_Reduce(mine, slowest, calls, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    qsort(slowest, (size_t)calls, sizeof(double), by_value);
    printf("{\"bytes\": %zu, \"calls\": %d, \"p50_us\": %.3f, \"p99_us\": %.3f}\n", bytes, calls,
           1e6 * slowest[calls / 2], 1e6 * slowest[calls - 1 - calls / 100]);
    fflush(stdout);
  }
  free(slowest);
  free(mine);
  if (!in_place) free(out);
  free(in);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  if (argc < 4) die("usage: all_reduce SAMPLES IN_PLACE BYTES...");
  const int samples = atoi(argv[1]), in_place = atoi(argv[2]);
  if (samples < 1) die("expected SAMPLES to be 1 or more");
  for (int i = 3; i < argc; ++i) {
    const long long bytes = atoll(argv[i]);
    if (bytes < 4 || bytes % 4 != 0) die("expected BYTES to be a positive multiple of 4");
    /* Fewer of the long ones: about as many bytes in all, but at least 5 calls. */
    const long long most = (long long)samples * (8 << 20) / bytes;
    measure((size_t)bytes, most >= samples ? samples : most < 5 ? 5 : (int)most, in_place);
  }
  MPI_Finalize();
  return 0;
}
