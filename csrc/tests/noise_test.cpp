// The noise against tests/reference.py's known answers, on the arm that EDGEES_ISA names; each SIMD
// kernel against a plain loop. Exit code 0: all as they should be.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../api.h"
#include "../kernels.h"
#include "../noise.h"

using namespace edgees;

namespace {

struct PhiloxCase {
  int rounds;
  uint64_t key;
  uint32_t counter[4], words[4];
};
struct KeysCase {
  uint64_t seed;
  uint32_t generation, pair;
  uint64_t key;
};
struct EpsCase {
  int kind, rank, vector;
  uint64_t key;
  int64_t row0, rows, cols;
  uint64_t fnv;
};
struct DitherCase {
  uint64_t seed;
  int64_t rows, cols;
  uint64_t fnv;
};
struct DeltaCase {
  int kind, rank, vector;
  int64_t rows, cols;
  int pairs;
  float keep;
  uint64_t fnv;
};
struct FactorsCase {
  int rank;
  int64_t rows, factors;
  int pairs;
  float keep;
  uint64_t fnv;
};
#include "noise_v1.inc"

int failures = 0;
void check(bool ok, const char* what, int64_t i) {
  if (ok) return;
  ++failures;
  fprintf(stderr, "FAIL %s, case %lld (%s)\n", what, static_cast<long long>(i), edgees_isa());
}

uint64_t fnv(const std::vector<float>& v) {
  uint64_t h = 0xCBF29CE484222325u;
  const unsigned char* p = reinterpret_cast<const unsigned char*>(v.data());
  for (size_t i = 0; i < v.size() * sizeof(float); ++i) h = (h ^ p[i]) * 0x100000001B3u;
  return h;
}

std::vector<float> start(int64_t n) {
  std::vector<float> v(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) v[i] = static_cast<float>((i * 40503) & 0xFFFF) / 65536 - 0.5f;
  return v;
}

void known_answers() {
  int64_t i = 0;
  for (const PhiloxCase& c : kPhilox) {
    const uint32_t* n = c.counter;
    uint32_t words[4];
    if (c.rounds == 7) {
      edgees_philox(c.key, n[1], n[2], n[3], n[0], 1, words);
    } else {
      const Words4 r = philox4x32<10>(c.key, n[0], n[1], n[2], n[3]);
      memcpy(words, r.w, sizeof words);
    }
    check(memcmp(words, c.words, sizeof words) == 0, "philox", i++);
  }
  i = 0;
  for (const KeysCase& c : kKeys) {
    check(edgees_key(c.seed, c.generation, c.pair) == c.key, "key", i++);
  }
  i = 0;
  for (const EpsCase& c : kEps) {
    std::vector<float> out(static_cast<size_t>(c.rows * c.cols));
    edgees_eps(c.kind, c.rank, c.vector, c.key, kTensor, c.row0, c.rows, c.cols, out.data());
    check(fnv(out) == c.fnv, "eps", i++);
  }
  i = 0;
  for (const DitherCase& c : kDither) {
    std::vector<float> out(static_cast<size_t>(c.rows * c.cols));
    const uint64_t key = edgees_key(c.seed, 0xFFFFFFFFu, 1);
    edgees_dither(key, kTensor, 0, c.rows, c.cols, out.data());
    check(fnv(out) == c.fnv, "dither", i++);
  }
  uint64_t keys[3];
  uint32_t slots[3];
  const float coefs[3] = {0.01f, -0.02f, 0.03f};
  for (uint32_t p = 0; p < 3; ++p) {
    keys[p] = edgees_key(11, 4, p);
    slots[p] = 3 * p + 1;
  }
  i = 0;
  for (const DeltaCase& c : kDelta) {
    std::vector<float> delta = start(c.rows * c.cols);
    edgees_delta_apply(delta.data(), c.rows, c.cols, 0, kTensor, c.kind, c.rank, c.vector, c.pairs,
                       keys, coefs, c.keep);
    check(fnv(delta) == c.fnv, "delta", i++);
  }
  i = 0;
  for (const FactorsCase& c : kFactors) {
    std::vector<float> a = start(c.rows * c.factors);
    edgees_factors_apply(a.data(), c.rows, c.factors, kTensor, c.rank, c.pairs, keys, slots, coefs,
                         c.keep);
    check(fnv(a) == c.fnv, "factors", i++);
  }
}

// Buffers of exactly n elements, so that a sanitizer sees a kernel that reads or writes past them.
void kernel_edges() {
  const Kernels& k = kernels();
  for (int64_t n = 0; n <= 300; n += n < 140 ? 1 : 13) {
    const int64_t blocks = (n + 127) / 128;
    std::vector<uint32_t> words(static_cast<size_t>(4 * blocks));
    k.philox(77, 1, 2, 3, 0xFFFFFFF0u, blocks, words.data());
    for (int64_t b = 0; b < blocks; ++b) {
      const Words4 r =
          philox4x32<kNoiseRounds>(77, 0xFFFFFFF0u + static_cast<uint32_t>(b), 1, 2, 3);
      check(memcmp(r.w, words.data() + 4 * b, 16) == 0, "kernel philox", n);
    }
    const std::vector<float> x = start(n);
    std::vector<float> got = x, want = x;
    k.add_signs(got.data(), n, words.data(), 0.3f);
    for (int64_t j = 0; j < n; ++j) want[j] += sign_bit(words.data(), j) ? -0.3f : 0.3f;
    check(got == want, "kernel add_signs", n);
    double dot = 0;
    for (int64_t j = 0; j < n; ++j) dot += sign_bit(words.data(), j) ? -x[j] : x[j];
    const float sum = k.sign_dot(words.data(), x.data(), n);
    check(std::fabs(sum - dot) <= 1e-6 * static_cast<double>(n), "kernel sign_dot", n);

    std::vector<uint32_t> halves(static_cast<size_t>(half_word_count(n)));
    k.philox(78, 1, 2, 3, 0, (n + 7) / 8, halves.data());
    got = want = x;
    k.add_normals(got.data(), n, halves.data(), 0.3f);
    for (int64_t j = 0; j < n; ++j) {
      const int32_t v = normal_integer(kNormalTable, half_word(halves.data(), j));
      want[j] += 0.3f * static_cast<float>(v);
    }
    check(got == want, "kernel add_normals", n);
    got = want = x;
    k.decay_add(got.data(), x.data(), n, 0.9f);
    for (int64_t j = 0; j < n; ++j) want[j] = 0.9f * want[j] + x[j];
    check(got == want, "kernel decay_add", n);
  }
  // every half-word there is
  std::vector<uint32_t> all(1 << 15);
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = (2 * i + 1) << 16 | 2 * i;
  std::vector<float> got(1 << 16), want(1 << 16);
  k.add_normals(got.data(), 1 << 16, all.data(), kNormalScale);
  double square = 0;
  for (uint32_t h = 0; h < 1 << 16; ++h) {
    want[h] = kNormalScale * static_cast<float>(normal_integer(kNormalTable, h)) + 0.0f;
    square += static_cast<double>(want[h]) * want[h];
  }
  check(got == want, "all half-words", 0);
  check(std::fabs(square / 65536 - 1) < 1e-6, "variance of the normals", 0);
}

void refusals() {
  float f[4] = {};
  uint32_t w[4];
  const uint64_t key = 1;
  const int64_t big = int64_t{1} << 32;
  check(edgees_philox(1, 0, 0, 0, 0xFFFFFFFFu, 2, w) == EDGEES_E_ARGUMENT, "refusal", 0);
  check(edgees_philox(1, 0, 0, 0, 0, -1, w) == EDGEES_E_ARGUMENT, "refusal", 1);
  check(edgees_eps(3, 1, 0, 1, 0, 0, 1, 4, f) == EDGEES_E_ARGUMENT, "refusal", 2);
  check(edgees_eps(1, 0, 0, 1, 0, 0, 1, 4, f) == EDGEES_E_ARGUMENT, "refusal", 3);
  check(edgees_eps(1, 257, 0, 1, 0, 0, 1, 4, f) == EDGEES_E_ARGUMENT, "refusal", 4);
  check(edgees_eps(0, 1, 1, 1, 0, 0, 2, 2, f) == EDGEES_E_ARGUMENT, "refusal", 5);
  check(edgees_eps(0, 1, 0, 1, 0, big, 1, 4, f) == EDGEES_E_ARGUMENT, "refusal", 6);
  check(edgees_eps(0, 1, 0, 1, 0, -1, 1, 4, f) == EDGEES_E_ARGUMENT, "refusal", 7);
  check(edgees_eps(0, 1, 0, 1, 0, 0, 1, 4, nullptr) == EDGEES_E_ARGUMENT, "refusal", 8);
  check(edgees_sign_vector(1, 0, 0, -1, f) == EDGEES_E_ARGUMENT, "refusal", 9);
  check(edgees_dither(1, 0, 0, 1, big, f) == EDGEES_E_ARGUMENT, "refusal", 10);
  check(edgees_delta_apply(f, 1, 4, 0, 0, 0, 1, 0, 1, nullptr, f, 1) == EDGEES_E_ARGUMENT,
        "refusal", 11);
  check(edgees_delta_apply(f, 1, 4, 0, 0, 0, 1, 0, -1, &key, f, 1) == EDGEES_E_ARGUMENT, "refusal",
        12);
  check(edgees_factors_apply(f, 1, 0, 0, 1, 1, &key, w, f, 1) == EDGEES_E_ARGUMENT, "refusal", 13);
  check(edgees_eps(0, 1, 0, 1, 0, 0, 0, 4, nullptr) == 0, "nothing to do", 0);
  check(edgees_delta_apply(f, 1, 4, 0, 0, 0, 1, 0, 0, nullptr, nullptr, 1) == 0, "no pairs", 0);
}

}  // namespace

int main() {
  const char* wanted = getenv("EDGEES_ISA");
  check(!wanted || !*wanted || strcmp(wanted, edgees_isa()) == 0, "EDGEES_ISA is not usable", 0);
  known_answers();
  kernel_edges();
  refusals();
  printf("noise: %s, %s\n", edgees_isa(), failures ? "FAILED" : "ok");
  return failures != 0;
}
