// A small thread pool of our own: OpenMP's spinning waits cost 20x beside another pool, and fixed
// partitions (not thread counts) decide what is summed with what.
#pragma once
#include <cstdint>
#include <functional>

namespace edgees {

// Threads that parallel_for uses, the caller included; 0 = all processors this process may run on.
void set_threads(int n);
int threads();

// Calls body(i, thread) once for each i in [0, n), in any order, on the pool's threads, and returns
// when all are done. Bodies must not depend on order or thread. Nested calls run in the caller.
void parallel_for(int64_t n, const std::function<void(int64_t, int)>& body);

// Rows that one task takes of a matrix of `cols` columns: about 32 Ki weights.
inline int64_t rows_per_task(int64_t cols) { return cols < 32768 ? 32768 / cols : 1; }

// Calls body(row) once for each row, rows_per_task(cols) of them in a task.
template <class Body>
void each_row(int64_t rows, int64_t cols, Body body) {
  const int64_t chunk = rows_per_task(cols);
  parallel_for((rows + chunk - 1) / chunk, [&](int64_t i, int) {
    const int64_t end = i * chunk + chunk < rows ? i * chunk + chunk : rows;
    for (int64_t r = i * chunk; r < end; ++r) body(r);
  });
}

}  // namespace edgees
