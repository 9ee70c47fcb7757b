#include "parallel.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define EDGEES_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define EDGEES_PAUSE() __asm__ __volatile__("yield")
#else
#define EDGEES_PAUSE() ((void)0)
#endif

namespace edgees {
namespace {

thread_local bool inside = false;

class Pool {
 public:
  explicit Pool(int n) {
    for (int t = 1; t < n; ++t) workers_.emplace_back([this, t] { work(t); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& w : workers_) w.join();
  }
  int size() const { return static_cast<int>(workers_.size()) + 1; }

  void run(int64_t n, const std::function<void(int64_t, int)>& body) {
    body_ = &body;
    n_ = n;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      round_.fetch_add(1, std::memory_order_release);
    }
    if (sleeping_.load() > 0) wake_.notify_all();
    take(0);
    // The tail of a product is microseconds: spin briefly, then yield to whoever holds the core.
    for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins) {
      if (spins < 4000) {
        EDGEES_PAUSE();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  void take(int t) {
    inside = true;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < n_;) (*body_)(i, t);
    inside = false;
  }
  void work(int t) {
    uint64_t seen = 0;
    for (;;) {
      uint64_t now;
      for (int spins = 0; (now = round_.load(std::memory_order_acquire)) == seen; ++spins) {
        if (spins < 2000) {
          EDGEES_PAUSE();
          continue;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1);
        wake_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
        sleeping_.fetch_sub(1);
      }
      seen = now;
      if (stop_) return;
      take(t);
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> round_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int> busy_{0};
  std::atomic<int> sleeping_{0};
  int64_t n_ = 0;
  const std::function<void(int64_t, int)>* body_ = nullptr;
  bool stop_ = false;
};

std::mutex pool_mutex;
Pool* pool = nullptr;  // never destroyed at exit: workers may outlive static destructors
std::atomic<int> wanted{0};
pid_t owner = 0;

int processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n ? static_cast<int>(n) : 1;
}

}  // namespace

void set_threads(int n) {
  std::lock_guard<std::mutex> lock(pool_mutex);
  wanted = n < 0 ? 0 : n;
}

int threads() {
  const int n = wanted;
  return n > 0 ? n : processors();
}

void parallel_for(int64_t n, const std::function<void(int64_t, int)>& body) {
  const int want = threads();
  if (n <= 1 || inside || want == 1) {
    for (int64_t i = 0; i < n; ++i) body(i, 0);
    return;
  }
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (pool && owner != getpid()) pool = nullptr;  // after fork: its threads are not ours
  if (!pool || pool->size() != want) {
    delete pool;
    pool = new Pool(want);
    owner = getpid();
  }
  pool->run(n, body);
}

}  // namespace edgees
