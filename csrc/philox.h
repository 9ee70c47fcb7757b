// Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11), as in
// Random123. C++17 and CUDA device code.
#pragma once
#include <stdint.h>

#if defined(__CUDACC__)
#define EDGEES_HD __host__ __device__
#else
#define EDGEES_HD
#endif

namespace edgees {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u,
                   kPhiloxM1 = 0xCD9E8D57u;  // multipliers of words 0 and 2
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u,
                   kPhiloxW1 = 0xBB67AE85u;  // what a round adds to the key

struct Words4 {
  uint32_t w[4];
};

template <int Rounds>
EDGEES_HD inline Words4 philox4x32(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2,
                                   uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int r = 0; r < Rounds; ++r) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c0;
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxM1) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace edgees
