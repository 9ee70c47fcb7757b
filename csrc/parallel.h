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

}  // namespace edgees
