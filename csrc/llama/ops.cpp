#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "../kernels.h"
#include "../parallel.h"

namespace edgees {
namespace {

using namespace ggml;

int op_rms_norm, op_rope, op_set_rows, op_get_rows, op_attention, op_glu, op_add, op_scale;

constexpr int kSwiglu = 2;  // ggml_glu_op
constexpr int kRopeNormal = 0, kRopeNeox = 2;
constexpr int64_t kSmall = 16384;  // numbers that are not worth waking threads for

const float* floats(const Tensor* t) { return static_cast<const float*>(t->data); }
float* floats(Tensor* t) { return static_cast<float*>(t->data); }

int64_t rows_of(const Tensor* t) { return t->ne[1] * t->ne[2] * t->ne[3]; }

template <class T>
T* row(const Tensor* t, int64_t i) {
  const int64_t i1 = i % t->ne[1], i2 = i / t->ne[1] % t->ne[2], i3 = i / t->ne[1] / t->ne[2];
  return reinterpret_cast<T*>(static_cast<char*>(t->data) + i1 * t->nb[1] + i2 * t->nb[2] +
                              i3 * t->nb[3]);
}

bool dense_floats(const Tensor* t) { return t && t->type == kF32 && t->nb[0] == sizeof(float); }

bool same_shape(const Tensor* a, const Tensor* b) {
  return std::equal(a->ne, a->ne + kDims, b->ne);
}

float number(const Tensor* t, int i) {
  float v;
  memcpy(&v, &t->op_params[i], sizeof v);
  return v;
}

// body(i) for all rows, by several threads where that pays.
template <class Body>
void each_row(int64_t rows, int64_t width, Body body) {
  if (rows * width < kSmall) {
    for (int64_t i = 0; i < rows; ++i) body(i);
    return;
  }
  const int64_t chunk = std::max<int64_t>(1, kSmall / 4 / width);
  parallel_for((rows + chunk - 1) / chunk, [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * chunk);
    for (int64_t i = task * chunk; i < end; ++i) body(i);
  });
}

// ---- rotary embeddings (RoFormer; YaRN's scaling), rotations of a batch made once per graph
struct Rotations {
  const void *positions, *factors;
  int32_t params[kParamWords];
  int64_t tokens;
  std::vector<float> table;  // [token][pair][cos, sin]
};
std::vector<std::unique_ptr<Rotations>> kept_rotations;

float yarn_dimension(int dims, int context, float rotations, float base) {
  return static_cast<float>(dims) *
         std::log(static_cast<float>(context) / (rotations * 2 * static_cast<float>(M_PI))) /
         (2 * std::log(base));
}

const float* rotations(const Tensor* node) {
  const Tensor* factors = node->src[2];
  const int32_t* positions = static_cast<const int32_t*>(node->src[1]->data);
  const int64_t tokens = node->ne[2];
  for (const auto& r : kept_rotations) {
    if (r->positions == positions && r->tokens == tokens &&
        r->factors == (factors ? factors->data : nullptr) &&
        memcmp(r->params, node->op_params, sizeof r->params) == 0) {
      return r->table.data();
    }
  }
  auto made = std::make_unique<Rotations>();
  made->positions = positions;
  made->factors = factors ? factors->data : nullptr;
  made->tokens = tokens;
  memcpy(made->params, node->op_params, sizeof made->params);
  const int dims = node->op_params[1], context = node->op_params[4];
  const float base = number(node, 5), scale = number(node, 6), extrapolate = number(node, 7);
  const float attention = number(node, 8), fast = number(node, 9), slow = number(node, 10);
  const float step = std::pow(base, -2.0f / static_cast<float>(dims));
  const float low = std::max(0.0f, std::floor(yarn_dimension(dims, context, fast, base)));
  const float high =
      std::min(static_cast<float>(dims - 1), std::ceil(yarn_dimension(dims, context, slow, base)));
  made->table.resize(static_cast<size_t>(tokens * dims));
  each_row(tokens, 32 * dims, [&](int64_t t) {
    float angle = static_cast<float>(positions[t]);
    float* out = &made->table[static_cast<size_t>(t * dims)];
    for (int i = 0; i < dims; i += 2) {
      const float raw = factors ? angle / floats(factors)[i / 2] : angle;
      float theta = scale * raw, size = attention;
      if (extrapolate != 0.0f) {
        const float at = (static_cast<float>(i / 2) - low) / std::max(0.001f, high - low);
        const float mix = (1 - std::min(1.0f, std::max(0.0f, at))) * extrapolate;
        theta = theta * (1 - mix) + raw * mix;
        size *= 1.0f + 0.1f * std::log(1.0f / scale);
      }
      out[i] = std::cos(theta) * size;
      out[i + 1] = std::sin(theta) * size;
      angle *= step;
    }
  });
  kept_rotations.push_back(std::move(made));
  return kept_rotations.back()->table.data();
}

bool can_rotate(const Tensor* node) {
  const int mode = node->op_params[2], dims = node->op_params[1];
  const Tensor* factors = node->src[2];
  return dense_floats(node) && dense_floats(node->src[0]) && node->src[1]->type == kI32 &&
         (mode == kRopeNormal || mode == kRopeNeox) && dims <= node->ne[0] && dims % 2 == 0 &&
         node->op_params[15] == 0 && node->ne[3] == 1 && (!factors || factors->type == kF32);
}

void rotate(Tensor* node) {
  const Tensor* in = node->src[0];
  const int dims = node->op_params[1], half = dims / 2;
  const bool neox = node->op_params[2] == kRopeNeox;
  const float* table = rotations(node);
  each_row(rows_of(node), node->ne[0], [&](int64_t i) {
    const float* x = row<const float>(in, i);
    float* y = row<float>(node, i);
    const float* turn = table + i / node->ne[1] * dims;
    for (int k = 0; k < half; ++k) {
      const int a = neox ? k : 2 * k, b = neox ? k + half : 2 * k + 1;
      const float c = turn[2 * k], s = turn[2 * k + 1], u = x[a], v = x[b];
      y[a] = u * c - v * s;
      y[b] = u * s + v * c;
    }
    for (int64_t k = dims; k < node->ne[0]; ++k) y[k] = x[k];
  });
}

// ---- attention (scaled dot product, with mask, ALiBi slopes, soft cap and sinks)
struct Seen {
  const void* mask;
  std::vector<int64_t> cells;  // by row of the mask: one more than the last that is seen
};
std::vector<std::unique_ptr<Seen>> kept_seen;

const std::vector<int64_t>& seen(const Tensor* mask) {
  for (const auto& s : kept_seen)
    if (s->mask == mask->data) return s->cells;
  auto made = std::make_unique<Seen>();
  made->mask = mask->data;
  const int64_t rows = rows_of(mask);
  made->cells.resize(static_cast<size_t>(rows));
  each_row(rows, mask->ne[0], [&](int64_t i) {
    const uint16_t* m = row<const uint16_t>(mask, i);
    int64_t n = mask->ne[0];
    while (n > 0 && m[n - 1] == kMinusInfinity) --n;
    made->cells[static_cast<size_t>(i)] = n;
  });
  kept_seen.push_back(std::move(made));
  return kept_seen.back()->cells;
}

bool can_attend(const Tensor* node) {
  const Tensor *q = node->src[0], *k = node->src[1], *v = node->src[2], *mask = node->src[3];
  return dense_floats(node) && dense_floats(q) && k->type == kF16 && v->type == kF16 &&
         k->nb[0] == 2 && v->nb[0] == 2 && k->ne[2] == v->ne[2] && k->ne[3] == q->ne[3] &&
         v->ne[3] == q->ne[3] && q->ne[2] % k->ne[2] == 0 && mask && mask->type == kF16 &&
         mask->nb[0] == 2 && mask->ne[2] == 1 && q->ne[3] % mask->ne[3] == 0 &&
         mask->ne[1] >= q->ne[1] && (!node->src[4] || node->src[4]->type == kF32);
}

void attention(Tensor* node) {
  const Tensor *q = node->src[0], *k = node->src[1], *v = node->src[2], *mask = node->src[3];
  const int64_t tokens = q->ne[1], heads = q->ne[2], groups = k->ne[2], streams = q->ne[3];
  const int64_t per = heads / groups;
  const float bias = number(node, 1);
  std::vector<float> slope;
  if (bias > 0.0f) {
    const int64_t power = int64_t{1} << static_cast<int>(std::floor(std::log2(heads)));
    const float even = std::pow(2.0f, -bias / static_cast<float>(power));
    const float odd = std::pow(2.0f, -bias / 2.0f / static_cast<float>(power));
    for (int64_t h = 0; h < heads; ++h) {
      slope.push_back(h < power ? std::pow(even, static_cast<float>(h + 1))
                                : std::pow(odd, static_cast<float>(2 * (h - power) + 1)));
    }
  }
  const std::vector<int64_t>& cells = seen(mask);
  const auto body = [&](int64_t task, int) {
    static thread_local std::vector<float> scores;
    const int64_t g = task % groups, t = task / groups % tokens, s = task / groups / tokens;
    const int64_t m = s % mask->ne[3] * mask->ne[1] + t;
    Attend a{};
    a.cells = cells[static_cast<size_t>(m)];
    a.room = (a.cells + 15) / 16 * 16;
    a.dk = k->ne[0];
    a.dv = v->ne[0];
    const auto at = [](const Tensor* x, int64_t i1, int64_t i2, int64_t i3) {
      return static_cast<char*>(x->data) + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3];
    };
    a.k = reinterpret_cast<const uint16_t*>(at(k, 0, g, s));
    a.v = reinterpret_cast<const uint16_t*>(at(v, 0, g, s));
    a.k_stride = static_cast<int64_t>(k->nb[1] / 2);
    a.v_stride = static_cast<int64_t>(v->nb[1] / 2);
    a.mask = row<const uint16_t>(mask, m);
    a.scale = number(node, 0);
    a.softcap = number(node, 2);
    for (int64_t first = g * per; first < (g + 1) * per; first += kAttendHeads) {
      a.heads = static_cast<int>(std::min<int64_t>(kAttendHeads, (g + 1) * per - first));
      const float* qs[kAttendHeads];
      float* outs[kAttendHeads];
      for (int h = 0; h < a.heads; ++h) {
        qs[h] = reinterpret_cast<const float*>(at(q, t, first + h, s));
        outs[h] = reinterpret_cast<float*>(at(node, first + h, t, s));
      }
      if (scores.size() < static_cast<size_t>(a.heads * a.room)) scores.resize(a.heads * a.room);
      a.q = qs;
      a.out = outs;
      a.scores = scores.data();
      a.slope = bias > 0.0f ? &slope[static_cast<size_t>(first)] : nullptr;
      a.sink = node->src[4] ? floats(node->src[4]) + first : nullptr;
      kernels().attend(a);
    }
  };
  const int64_t tasks = groups * tokens * streams;
  parallel_for(tasks, body);
}

// ---- the rest
bool can_set_rows(const Tensor* node) {
  const Tensor *in = node->src[0], *at = node->src[1];
  return node->type == kF16 && node->nb[0] == 2 && dense_floats(in) && in->ne[2] == 1 &&
         in->ne[3] == 1 && (at->type == kI64 || at->type == kI32) && at->ne[1] == 1 &&
         at->ne[2] == 1;
}
void set_rows(Tensor* node) {
  const Tensor *in = node->src[0], *at = node->src[1];
  each_row(in->ne[1], in->ne[0], [&](int64_t i) {
    const int64_t to = at->type == kI64 ? static_cast<const int64_t*>(at->data)[i]
                                        : static_cast<const int32_t*>(at->data)[i];
    kernels().to_half(
        row<const float>(in, i), in->ne[0],
        reinterpret_cast<uint16_t*>(static_cast<char*>(node->data) + to * node->nb[1]));
  });
}

bool can_get_rows(const Tensor* node) {
  const Tensor *from = node->src[0], *at = node->src[1];
  return dense_floats(node) && dense_floats(from) && from->ne[2] == 1 && from->ne[3] == 1 &&
         at->type == kI32 && at->ne[1] == 1 && at->ne[2] == 1 && at->ne[3] == 1;
}
void get_rows(Tensor* node) {
  const Tensor* from = node->src[0];
  const int32_t* at = static_cast<const int32_t*>(node->src[1]->data);
  for (int64_t i = 0; i < node->ne[1]; ++i) {
    memcpy(row<float>(node, i), row<const float>(from, at[i]),
           static_cast<size_t>(node->ne[0]) * sizeof(float));
  }
}

bool can_glu(const Tensor* node) {
  const Tensor *x = node->src[0], *g = node->src[1];
  return node->op_params[0] == kSwiglu && dense_floats(node) && dense_floats(x) &&
         (!g || (dense_floats(g) && same_shape(x, g)));
}
void glu(Tensor* node) {
  const Tensor *x = node->src[0], *g = node->src[1];
  const int64_t n = node->ne[0];
  const bool swapped = node->op_params[1] != 0;
  each_row(rows_of(node), 8 * n, [&](int64_t i) {
    const float* a = row<const float>(x, i);
    const float* b = g ? row<const float>(g, i) : a + (swapped ? 0 : n);
    kernels().swiglu(g || !swapped ? a : a + n, b, n, row<float>(node, i));
  });
}

bool can_norm(const Tensor* node) { return dense_floats(node) && dense_floats(node->src[0]); }
void norm(Tensor* node) {
  const float eps = number(node, 0);
  each_row(rows_of(node), node->ne[0], [&](int64_t i) {
    kernels().rms_norm(row<const float>(node->src[0], i), node->ne[0], eps, row<float>(node, i));
  });
}

bool can_add(const Tensor* node) {
  return dense_floats(node) && dense_floats(node->src[0]) && dense_floats(node->src[1]) &&
         same_shape(node->src[0], node->src[1]);
}
void add(Tensor* node) {
  each_row(rows_of(node), node->ne[0], [&](int64_t i) {
    const float *a = row<const float>(node->src[0], i), *b = row<const float>(node->src[1], i);
    float* y = row<float>(node, i);
    for (int64_t j = 0; j < node->ne[0]; ++j) y[j] = a[j] + b[j];
  });
}

bool can_scale(const Tensor* node) { return dense_floats(node) && dense_floats(node->src[0]); }
void scale(Tensor* node) {
  const float by = number(node, 0), plus = number(node, 1);
  each_row(rows_of(node), node->ne[0], [&](int64_t i) {
    const float* x = row<const float>(node->src[0], i);
    float* y = row<float>(node, i);
    for (int64_t j = 0; j < node->ne[0]; ++j) y[j] = x[j] * by + plus;
  });
}

struct Op {
  const char* name;
  int* number;
  bool (*can)(const Tensor*);
  void (*run)(Tensor*);
};
const Op kOps[] = {{"RMS_NORM", &op_rms_norm, can_norm, norm},
                   {"ROPE", &op_rope, can_rotate, rotate},
                   {"SET_ROWS", &op_set_rows, can_set_rows, set_rows},
                   {"GET_ROWS", &op_get_rows, can_get_rows, get_rows},
                   {"FLASH_ATTN_EXT", &op_attention, can_attend, attention},
                   {"GLU", &op_glu, can_glu, glu},
                   {"ADD", &op_add, can_add, add},
                   {"SCALE", &op_scale, can_scale, scale}};

const Op* find(const Tensor* node) {
  for (const Op& op : kOps)
    if (*op.number == node->op) return &op;
  return nullptr;
}

}  // namespace

const char* find_ops(const char* (*op_name)(int), int last) {
  for (const Op& op : kOps) {
    *op.number = -1;
    for (int i = 0; i <= last && *op.number < 0; ++i) {
      const char* name = op_name(i);
      if (name && strcmp(name, op.name) == 0) *op.number = i;
    }
    if (*op.number < 0) return op.name;
  }
  return nullptr;
}

bool can_run(const Tensor* node) {
  const Op* op = find(node);
  return op && op->can(node);
}
void run_op(Tensor* node) { find(node)->run(node); }
void forget_ops() {
  kept_rotations.clear();
  kept_seen.clear();
}

}  // namespace edgees
