// A GPU of one block at a time on the host: the same kernel source as C++17. The threads of a block
// are fibers of one thread; which of those that can go on does so next is drawn from a seed, so
// that a race changes the result or runs into the checks: shared memory starts as NaNs, and a
// barrier that not all threads of its block or warp reach is a fault. POSIX only.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../blocks.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
};
struct __attribute__((may_alias, aligned(8))) uint2 {
  uint32_t x, y;
};
struct __attribute__((may_alias, aligned(16))) uint4 {
  uint32_t x, y, z, w;
};
struct __attribute__((may_alias, aligned(16))) float4 {
  float x, y, z, w;
};

namespace emulate {

constexpr unsigned kLanes = 32;
constexpr size_t kStack = 128 << 10, kSharedBytes = 48 << 10;

struct Collective {  // a barrier, with room for what lanes show each other, twice by turns
  unsigned size = 0, waiting = 0, round = 0;
  uint64_t shown[2][kLanes][10];
};
struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  bool started = false;
  std::unique_ptr<char[]> stack;
};
struct Thread {
  Fiber fiber;
  uint3 index;
  Collective* waits = nullptr;
  unsigned round = 0;
  size_t shared = 0;
  bool done = false;
};

struct Device {
  dim3 grid, block;
  uint3 at;
  std::vector<std::unique_ptr<Thread>> fibers;  // as many as the largest block had
  std::vector<Collective> warps;
  Collective all;
  Thread* now = nullptr;
  Fiber scheduler;
  void (*kernel)(const void*) = nullptr;
  const void* argument = nullptr;
  std::vector<char> shared;
  uint64_t seed = 0;
};
inline Device device;

// Goes on with another fiber, until someone goes on with this one. swapcontext asks the kernel each
// time; sanitizers know it, though, and not jumps between stacks.
__attribute__((noinline)) inline void go_on(Fiber& here, Fiber& there) {
#if defined(__SANITIZE_ADDRESS__)
  swapcontext(&here.context, &there.context);
#else
  if (_setjmp(here.jump)) return;
  here.started = true;
  if (there.started) _longjmp(there.jump, 1);
  setcontext(&there.context);
#endif
}

[[noreturn]] inline void fault(const char* what) {
  fprintf(stderr, "emulated kernel: %s (block %u %u, thread %u %u %u)\n", what, device.at.x,
          device.at.y, device.now->index.x, device.now->index.y, device.now->index.z);
  abort();
}

// The calling thread's next piece of the block's shared memory: all threads ask in the same order.
inline void* shared(size_t bytes) {
  Thread& t = *device.now;
  void* p = device.shared.data() + t.shared;
  t.shared += (bytes + 15) / 16 * 16;
  if (t.shared > device.shared.size()) fault("too much shared memory");
  return p;
}

inline void wait(Collective& c) {
  Thread& t = *device.now;
  t.round = c.round;
  if (++c.waiting == c.size) {
    c.waiting = 0;
    ++c.round;
    return;
  }
  t.waits = &c;
  go_on(t.fiber, device.scheduler);
}

inline unsigned rank() {
  const uint3& i = device.now->index;
  return i.x + device.block.x * (i.y + device.block.y * i.z);
}
// All lanes show n words and see everyone's.
inline const uint64_t (*show(const uint64_t* words, int n))[10] {
  Collective& c = device.warps[rank() / kLanes];
  uint64_t (*to)[10] = c.shown[c.round % 2];
  std::copy(words, words + n, to[rank() % kLanes]);
  wait(c);
  return to;
}

inline void entry() {
  for (;;) {
    device.kernel(device.argument);
    device.now->done = true;
    go_on(device.now->fiber, device.scheduler);
  }
}

inline void make(Thread& t) {
  Fiber& f = t.fiber;
  f.stack.reset(new char[kStack]);
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.get();
  f.context.uc_stack.ss_size = kStack;
  f.context.uc_link = nullptr;
  makecontext(&f.context, entry, 0);
}

inline void run_block() {
  memset(device.shared.data(), 0xFF, device.shared.size());
  const unsigned n = device.block.x * device.block.y * device.block.z;
  device.all = {};
  device.all.size = n;
  for (Collective& w : device.warps) w = {}, w.size = kLanes;
  std::vector<unsigned> order(n);
  for (unsigned i = 0; i < n; ++i) {
    Thread& t = *device.fibers[i];
    const dim3& b = device.block;
    order[i] = i;
    t.index = {i % b.x, i / b.x % b.y, i / (b.x * b.y)};
    t.waits = nullptr;
    t.shared = 0;
    t.done = false;
  }
  for (unsigned left = n; left;) {
    for (unsigned i = n; device.seed && i > 1; --i) {  // a new order each time around
      device.seed = device.seed * 6364136223846793005u + 1442695040888963407u;
      std::swap(order[i - 1], order[(device.seed >> 33) % i]);
    }
    bool moved = false;
    for (unsigned i : order) {
      Thread& t = *device.fibers[i];
      if (t.done || (t.waits && t.waits->round == t.round)) continue;
      t.waits = nullptr;
      device.now = &t;
      moved = true;
      go_on(device.scheduler, t.fiber);
      if (t.done) --left;
    }
    if (!moved) fault("a barrier that not all threads reach");
  }
}

// seed 0: threads in their own order.
inline void launch(void (*kernel)(const void*), const void* argument, dim3 grid, dim3 block,
                   uint64_t seed) {
  const size_t n = size_t{block.x} * block.y * block.z;
  if (n == 0 || n % kLanes || n > 1024) {
    fprintf(stderr, "emulated kernel: a block of %zu threads\n", n);
    abort();
  }
  device.grid = grid;
  device.block = block;
  device.kernel = kernel;
  device.argument = argument;
  device.seed = seed;
  while (device.fibers.size() < n) {
    device.fibers.emplace_back(new Thread);
    make(*device.fibers.back());
  }
  device.warps.resize(n / kLanes);
  device.shared.resize(kSharedBytes);
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        device.at = {x, y, z};
        run_block();
      }
}

// Kernels by name.
struct Named {
  const char* name;
  void (*kernel)(const void*);
  size_t argument;  // bytes of its structure
  const Named* next;
  Named(const char* name, void (*kernel)(const void*), size_t argument)
      : name(name), kernel(kernel), argument(argument), next(first()) {
    first() = this;
  }
  static const Named*& first() {
    static const Named* head = nullptr;
    return head;
  }
  static const Named* find(const char* name) {
    const Named* k = first();
    while (k && strcmp(k->name, name) != 0) k = k->next;
    return k;
  }
};

// mma.sync m16n8k16 with the fragments of the PTX manual.
template <bool Brain>
void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const uint64_t mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const uint64_t (*lanes)[10] = show(mine, 6);
  const auto number = [](uint64_t word, int k) {
    const uint16_t h = static_cast<uint16_t>(word >> 16 * (k % 2));
    return Brain ? edgees::float_of(static_cast<uint32_t>(h) << 16) : edgees::half_to_float(h);
  };
  const int lane = static_cast<int>(rank() % kLanes);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
    float sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const float av = number(lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k);
      sum += av * number(lanes[col * 4 + k % 8 / 2][4 + k / 8], k);
    }
    c[i] = sum;
  }
}

}  // namespace emulate

#define threadIdx emulate::device.now->index
#define blockIdx emulate::device.at
#define blockDim emulate::device.block
#define gridDim emulate::device.grid

static inline void __syncthreads() { emulate::wait(emulate::device.all); }
template <class T>
static inline T shuffle(T v, unsigned from) {
  static_assert(sizeof(T) <= 8, "");
  uint64_t word = 0;
  memcpy(&word, &v, sizeof v);
  const uint64_t (*lanes)[10] = emulate::show(&word, 1);
  memcpy(&v, &lanes[from % emulate::kLanes][0], sizeof v);
  return v;
}
template <class T>
static inline T __shfl_xor_sync(unsigned, T v, int by) {
  return shuffle(v, emulate::rank() ^ static_cast<unsigned>(by));
}
template <class T>
static inline T __shfl_sync(unsigned, T v, int from) {
  return shuffle(v, static_cast<unsigned>(from));
}

template <class T>
static inline T __ldg(const T* p) {
  return *p;
}
static inline uint32_t __float_as_uint(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
static inline float __uint_as_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
