// parallel_for: each index once, from several callers, nested, and with changing thread counts.
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "../parallel.h"

using namespace edgees;

namespace {

int failures = 0;
void check(bool ok, const char* what) {
  if (ok) return;
  ++failures;
  fprintf(stderr, "FAIL %s\n", what);
}

// Plain ints on purpose: a sanitizer must see that the end of parallel_for orders their writes.
bool once(int64_t n) {
  std::vector<int> hits(static_cast<size_t>(n));
  parallel_for(n, [&](int64_t i, int) { ++hits[i]; });
  for (int h : hits) {
    if (h != 1) return false;
  }
  return true;
}

}  // namespace

int main() {
  for (int threads : {1, 2, 4, 3}) {
    set_threads(threads);
    check(edgees::threads() == threads, "threads()");
    for (int64_t n : {0, 1, 2, 3, 7, 1000}) check(once(n), "each index once");
    for (int i = 0; i < 200; ++i) check(once(5), "many short rounds");
    std::atomic<int> inner{0};
    parallel_for(8, [&](int64_t, int t) {
      if (t < 0 || t >= threads) inner += 1000;
      parallel_for(10, [&](int64_t, int) { ++inner; });
    });
    check(inner == 80, "nested calls");
  }
  std::vector<std::thread> callers;
  std::atomic<int> good{0};
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) good += once(20);
    });
  }
  for (auto& c : callers) c.join();
  check(good == 150, "several callers");
  set_threads(0);
  check(edgees::threads() >= 1 && once(100), "all processors");
  printf("parallel: %s\n", failures ? "FAILED" : "ok");
  return failures != 0;
}
