#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "api.h"
#include "kernels.h"
#include "parallel.h"

namespace edgees {
namespace {

constexpr int kArms = 5;  // at most, in one build

struct Arm {
  const Kernels* table;
  bool usable;
};

#if defined(__x86_64__) || defined(_M_X64)
// Leaf 7.1, EAX bit 4; not every compiler's __builtin_cpu_supports knows it.
bool avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || a < 1) return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

// __builtin_cpu_supports reads CPUID *and* XGETBV: an arm counts only where the operating system
// saves its registers.
int arms(Arm* out) {
  int n = 0;
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  out[n++] = {&kernels_avx512vnni, avx512 && __builtin_cpu_supports("avx512vnni")};
  out[n++] = {&kernels_avx512, avx512};
  out[n++] = {&kernels_avxvnni, avx2 && avx_vnni()};
  out[n++] = {&kernels_avx2, avx2};
#elif defined(__aarch64__)
  out[n++] = {&kernels_neon, true};
#endif
  out[n++] = {&kernels_scalar, true};
  return n;
}

std::atomic<const Kernels*> active{nullptr};

const Kernels* find(const char* name) {
  Arm a[kArms];
  const int n = arms(a);
  for (int i = 0; i < n; ++i) {
    if (a[i].usable && (!name || !*name || strcmp(name, a[i].table->name) == 0)) {
      return a[i].table;
    }
  }
  return nullptr;
}

}  // namespace

const Kernels& kernels() {
  const Kernels* now = active.load(std::memory_order_acquire);
  if (now) return *now;
  const Kernels* found = find(std::getenv("EDGEES_ISA"));
  if (!found) found = find(nullptr);  // the loader in Python refuses an unknown EDGEES_ISA
  active.store(found, std::memory_order_release);
  return *found;
}

}  // namespace edgees

extern "C" {
int edgees_abi(void) { return EDGEES_ABI; }
const char* edgees_isa(void) { return edgees::kernels().name; }
const char* edgees_isas(void) {
  static char text[64];
  text[0] = 0;
  edgees::Arm a[edgees::kArms];
  const int n = edgees::arms(a);
  for (int i = 0; i < n; ++i) {
    if (!a[i].usable) continue;
    if (text[0]) strcat(text, " ");
    strcat(text, a[i].table->name);
  }
  return text;
}
int edgees_set_isa(const char* name) {
  edgees::kernels();
  const edgees::Kernels* found = edgees::find(name);
  if (!found) return EDGEES_E_ARGUMENT;
  edgees::active = found;
  return 0;
}
void edgees_set_threads(int n) { edgees::set_threads(n); }
int edgees_threads(void) { return edgees::threads(); }
}
