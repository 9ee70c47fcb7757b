// edgees as a backend of stock llama.cpp, registered at run time as ggml's BLAS backend is: the
// scheduler hands it every operation that touches a tuned weight (product, embedding lookup, norm
// scale, bias), and it answers for the member to whom each column belongs. Everything else of the
// graph stays with ggml's CPU backend. The weights stay where llama.cpp mapped them.
#include <dlfcn.h>

#include <atomic>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "../api.h"
#include "../parallel.h"
#include "../product.h"
#include "ggml_abi.h"
#include "ops.h"

namespace edgees {
namespace {

using namespace ggml;

// What we call of ggml, found in the library that llama-cpp-python has loaded.
struct Host {
  void (*backend_register)(Registry*);
  Registry* (*reg_by_name)(const char*);
  Device* (*dev_by_type)(int);
  const char* (*dev_name)(Device*);
  int (*dev_type)(Device*);
  BufferType* (*cpu_buffer_type)();
  Buffer* (*cpu_buffer_from_ptr)(void*, size_t);
  bool (*buft_is_host)(BufferType*);
  Backend* (*dev_init)(Device*, const char*);
  const char* (*backend_name)(Backend*);
  void (*backend_free)(Backend*);
  int (*graph_compute)(Backend*, Graph*);
  Context* (*init)(InitParams);
  void (*free)(Context*);
  Tensor* (*new_tensor_2d)(Context*, int, int64_t, int64_t);
  Tensor* (*mul_mat)(Context*, Tensor*, Tensor*);
  Tensor* (*mul)(Context*, Tensor*, Tensor*);
  Tensor* (*swiglu_split)(Context*, Tensor*, Tensor*);
  Tensor* (*set_name)(Tensor*, const char*);
  Graph* (*new_graph)(Context*);
  void (*build_forward)(Graph*, Tensor*);
  int (*graph_n_nodes)(Graph*);
  Tensor* (*graph_node)(Graph*, int);
  const char* (*op_name)(int);
} host;

int op_none = -1, op_mul_mat = -1, op_get_rows = -1, op_mul = -1, op_add = -1, op_reshape = -1,
    op_view = -1, op_permute = -1, op_transpose = -1;

struct Entry {
  edgees_tensor t;
  bool vector;
  std::string name;
  std::string unclaimed;  // an operation on it that we cannot do: it would run unperturbed
  std::atomic<int64_t> seen{0};
};

}  // namespace
}  // namespace edgees

// One tuned model: its tensors, the members of the running batch, and who owns which column.
struct edgees_session {
  std::vector<edgees::Entry> entries;
  std::unordered_map<std::string, int> by_name;
  edgees_noise_kind noise{EDGEES_NOISE_LOWRANK, 1};
  std::vector<edgees_member> members;
  std::vector<int32_t> columns, outputs, tokens;
  std::string error;
  int64_t products = 0;

  explicit edgees_session(int n) : entries(n) {}
  bool fail(const char* format, ...) __attribute__((format(printf, 2, 3))) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (error.empty()) error = text;
    return false;
  }
};

namespace edgees {
namespace {

edgees_session* active = nullptr;
const Tensor* packed = nullptr;  // whose columns the last product of this graph has packed

Entry* lookup(const Tensor* w) {
  if (!active || !w) return nullptr;
  const auto it = active->by_name.find(w->name);
  return it == active->by_name.end() ? nullptr : &active->entries[it->second];
}

bool is_view(int op) {
  return op == op_none || op == op_reshape || op == op_view || op == op_permute ||
         op == op_transpose;
}

bool rows_are_floats(const Tensor* x) { return x->type == kF32 && x->nb[0] == sizeof(float); }

// Can we do this operation, all of it? `weight` is set to the tuned tensor it reads.
bool claims(const Tensor* node, Entry** weight) {
  *weight = nullptr;
  if (node->op == op_mul_mat) {
    Entry* e = lookup(node->src[0]);
    *weight = e;
    return e && !e->vector && node->src[0]->type == e->t.type && node->src[0]->ne[2] == 1 &&
           node->src[0]->ne[3] == 1 && node->src[0]->ne[0] == e->t.cols &&
           node->src[0]->ne[1] == e->t.rows && rows_are_floats(node->src[1]) &&
           rows_are_floats(node);
  }
  if (node->op == op_get_rows) {
    Entry* e = lookup(node->src[0]);
    *weight = e;
    return e && !e->vector && node->src[0]->type == e->t.type && node->src[1]->type == kI32 &&
           node->src[1]->ne[1] == 1 && node->src[1]->ne[2] == 1 && rows_are_floats(node);
  }
  if (node->op == op_mul || node->op == op_add) {
    Entry* e = lookup(node->src[1]);
    *weight = e;
    return e && e->vector && node->src[1]->type == e->t.type && node->src[1]->ne[1] == 1 &&
           node->src[0]->ne[0] == e->t.cols && rows_are_floats(node->src[0]) &&
           rows_are_floats(node);
  }
  return false;
}

bool supports(Device*, const Tensor* node) {
  if (is_view(node->op)) return true;
  if (!active) return false;
  Entry* weight;
  if (claims(node, &weight)) return true;
  for (int i = 0; i < kSources; ++i) {
    const Tensor* s = node->src[i];
    Entry* e = s ? lookup(s) : nullptr;
    if (s && !e && s->view_src) e = lookup(s->view_src);
    if (e && e->unclaimed.empty()) e->unclaimed = host.op_name(node->op);
    if (e) return false;
  }
  return can_run(node);
}

// Member of each token of a node whose tokens lie along its last used dimension, or null.
const int32_t* owners(edgees_session& s, const Tensor* node, int64_t* tokens, int64_t* per_token) {
  const int64_t all = node->ne[1] * node->ne[2] * node->ne[3];
  const int64_t last = node->ne[3] > 1 ? node->ne[3] : node->ne[2] > 1 ? node->ne[2] : node->ne[1];
  const int64_t n = static_cast<int64_t>(s.columns.size());
  const int64_t m = static_cast<int64_t>(s.outputs.size());
  const std::vector<int32_t>* map = nullptr;
  if (n == 1) {  // [width, heads, 1] looks like [width, tokens]: but there is one owner
    map = &s.columns;
    *tokens = 1;
  } else if (last == n || last == m) {
    map = last == n ? &s.columns : &s.outputs;
    *tokens = last;
  } else {
    return nullptr;
  }
  *per_token = all / *tokens;
  return map->data();
}

bool product(edgees_session& s, Entry& e, Tensor* node) {
  static Columns columns;
  const Tensor* x = node->src[1];
  int64_t tokens, per_token;
  const int32_t* owner = owners(s, node, &tokens, &per_token);
  if (!owner) {
    return s.fail(
        "%s: a product of %lld x %lld x %lld columns in a batch of %zu tokens (%zu outputs)",
        e.name.c_str(), (long long)node->ne[1], (long long)node->ne[2], (long long)node->ne[3],
        s.columns.size(), s.outputs.size());
  }
  static thread_local std::vector<const float*> xs;
  static thread_local std::vector<float*> ys;
  static thread_local std::vector<int32_t> member;
  const int64_t n = tokens * per_token;
  xs.resize(n);
  ys.resize(n);
  member.resize(n);
  int64_t c = 0;
  for (int64_t i3 = 0; i3 < node->ne[3]; ++i3)
    for (int64_t i2 = 0; i2 < node->ne[2]; ++i2)
      for (int64_t i1 = 0; i1 < node->ne[1]; ++i1, ++c) {
        xs[c] = reinterpret_cast<const float*>(static_cast<const char*>(x->data) + i1 * x->nb[1] +
                                               i2 * x->nb[2] + i3 * x->nb[3]);
        ys[c] = reinterpret_cast<float*>(static_cast<char*>(node->data) + i1 * node->nb[1] +
                                         i2 * node->nb[2] + i3 * node->nb[3]);
        member[c] = owner[c / per_token];
      }
  edgees_tensor t = e.t;
  if (!t.lattice) {
    t.base = node->src[0]->data;
    t.row_stride = static_cast<int64_t>(node->src[0]->nb[1]);
  }
  if (packed != x) columns.set(xs.data(), n, t.cols);
  packed = x;
  const int code = product(t, s.noise, s.members.data(), member.data(), columns, ys.data());
  return code == 0 || s.fail("%s: product failed with code %d", e.name.c_str(), code);
}

bool lookup_rows(edgees_session& s, Entry& e, Tensor* node) {
  const Tensor* ids = node->src[1];
  const int32_t* id = static_cast<const int32_t*>(ids->data);
  const int64_t n = ids->ne[0];
  // The one place where the batch's own order can be seen from inside the graph: compare it.
  if (n != static_cast<int64_t>(s.tokens.size()) ||
      memcmp(id, s.tokens.data(), n * sizeof(int32_t)) != 0) {
    return s.fail("%s: llama.cpp runs %lld tokens in an order other than the %zu submitted",
                  e.name.c_str(), (long long)n, s.tokens.size());
  }
  edgees_tensor t = e.t;
  if (!t.lattice) {
    t.base = node->src[0]->data;
    t.row_stride = static_cast<int64_t>(node->src[0]->nb[1]);
  }
  std::atomic<int> code{0};
  parallel_for(n, [&](int64_t i, int) {
    float* out = reinterpret_cast<float*>(static_cast<char*>(node->data) + i * node->nb[1]);
    const int got = edgees_row(&t, &s.noise, &s.members[s.columns[i]], id[i], out);
    if (got) code = got;
  });
  return code == 0 || s.fail("%s: lookup failed with code %d", e.name.c_str(), code.load());
}

bool elementwise(edgees_session& s, Entry& e, Tensor* node) {
  const Tensor* x = node->src[0];
  int64_t tokens, per_token;
  const int32_t* owner = owners(s, node, &tokens, &per_token);
  if (!owner) {
    return s.fail("%s: %lld x %lld x %lld vectors in a batch of %zu tokens (%zu outputs)",
                  e.name.c_str(), (long long)node->ne[1], (long long)node->ne[2],
                  (long long)node->ne[3], s.columns.size(), s.outputs.size());
  }
  edgees_tensor t = e.t;
  t.base = node->src[1]->data;
  const int64_t cols = t.cols;
  static thread_local std::vector<float> vectors;
  static thread_local std::vector<int32_t> place;
  place.assign(s.members.size(), -1);
  int32_t distinct = 0;
  for (int64_t i = 0; i < tokens; ++i)
    if (place[owner[i]] < 0) place[owner[i]] = distinct++;
  vectors.resize(static_cast<size_t>(distinct) * cols);
  for (size_t m = 0; m < s.members.size(); ++m) {
    if (place[m] < 0) continue;
    const int code = edgees_vector(&t, &s.noise, &s.members[m], &vectors[place[m] * cols]);
    if (code) return s.fail("%s: vector failed with code %d", e.name.c_str(), code);
  }
  const float* all = vectors.data();
  const int32_t* where = place.data();
  const bool multiply = node->op == op_mul;
  const int64_t inner = node->ne[1], middle = node->ne[2];
  const int64_t n = tokens * per_token;
  constexpr int64_t kChunk = 16;
  const auto body = [&](int64_t chunk, int) {
    const int64_t end = chunk * kChunk + kChunk < n ? chunk * kChunk + kChunk : n;
    for (int64_t c = chunk * kChunk; c < end; ++c) {
      const int64_t i1 = c % inner, i2 = c / inner % middle, i3 = c / inner / middle;
      const float* in = reinterpret_cast<const float*>(
          static_cast<const char*>(x->data) + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3]);
      float* out = reinterpret_cast<float*>(static_cast<char*>(node->data) + i1 * node->nb[1] +
                                            i2 * node->nb[2] + i3 * node->nb[3]);
      const float* w = all + where[owner[c / per_token]] * cols;
      if (multiply) {
        for (int64_t j = 0; j < cols; ++j) out[j] = in[j] * w[j];
      } else {
        for (int64_t j = 0; j < cols; ++j) out[j] = in[j] + w[j];
      }
    }
  };
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  if (n * cols < 16384) {
    for (int64_t i = 0; i < chunks; ++i) body(i, 0);
  } else {
    parallel_for(chunks, body);
  }
  return true;
}

int compute(Backend*, Graph* graph) {
  edgees_session* s = active;
  forget_ops();
  packed = nullptr;
  const int n = host.graph_n_nodes(graph);
  for (int i = 0; i < n; ++i) {
    Tensor* node = host.graph_node(graph, i);
    const int64_t columns = node->ne[1] * node->ne[2] * node->ne[3];
    if (is_view(node->op) || columns == 0) continue;  // 0: a call that wants no logits
    Entry* e;
    if (!s || !claims(node, &e)) {
      if (s && !e && can_run(node)) {
        run_op(node);
        continue;
      }
      if (s)
        s->fail("an operation %s was handed to edgees that it never claimed",
                host.op_name(node->op));
      return kFailed;
    }
    const bool ok = node->op == op_mul_mat    ? product(*s, *e, node)
                    : node->op == op_get_rows ? lookup_rows(*s, *e, node)
                                              : elementwise(*s, *e, node);
    if (!ok) return kFailed;
    e->seen.fetch_add(1, std::memory_order_relaxed);
    ++s->products;
  }
  return kSuccess;
}

const char* backend_name(Backend*) { return "edgees"; }
void backend_free(Backend* b) { delete b; }
const char* device_name(Device*) { return "edgees"; }
const char* device_description(Device*) { return "seeded perturbations of 4-bit weights"; }
void device_memory(Device*, size_t* free, size_t* total) { *free = *total = 0; }
int device_type(Device*) { return kAccel; }
void device_props(Device* d, DeviceProps* p) {
  *p = DeviceProps{};
  p->name = device_name(d);
  p->description = device_description(d);
  p->type = kAccel;
  p->caps.buffer_from_host_ptr = true;
  p->caps.mmap_support = true;
}
Backend* device_init(Device* d, const char*) {
  static const uint8_t guid[16] = {0xed, 0x9e, 0xe5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13};
  Backend* b = new Backend{};
  b->guid = &guid;
  b->iface.get_name = backend_name;
  b->iface.free = backend_free;
  b->iface.graph_compute = compute;
  b->device = d;
  return b;
}
BufferType* device_buffer_type(Device*) { return host.cpu_buffer_type(); }
Buffer* device_host_ptr(Device*, void* p, size_t n, size_t) {
  return host.cpu_buffer_from_ptr(p, n);
}
bool device_buft(Device*, BufferType* b) { return host.buft_is_host(b); }
const char* reg_name(Registry*) { return "edgees"; }
size_t reg_count(Registry*) { return 1; }

Registry registry{};
Device device{};
Device* reg_device(Registry*, size_t) { return &device; }

template <typename T>
bool find(void* library, const char* symbol, T* out) {
  *out = reinterpret_cast<T>(dlsym(library, symbol));
  return *out != nullptr;
}

// A product and a norm scale on a two-member batch, through ggml's own graph and our backend.
bool self_test(std::string* why) {
  edgees_session s(2);
  float w[4 * 32], scale[32], x[2 * 32];
  for (int i = 0; i < 4 * 32; ++i) w[i] = static_cast<float>((i * 7) % 11 - 5);
  for (int i = 0; i < 32; ++i) scale[i] = static_cast<float>(i % 3 + 1);
  for (int i = 0; i < 2 * 32; ++i) x[i] = static_cast<float>((i * 5) % 13 - 6);
  for (int i = 0; i < 2; ++i) {
    edgees_tensor& t = s.entries[i].t;
    t = edgees_tensor{};
    t.type = kF32;
    t.rows = i == 0 ? 4 : 1;
    t.cols = 32;
    t.row_stride = 32 * sizeof(float);
    t.rho = 1.0f;
    s.entries[i].vector = i == 1;
    s.entries[i].name = i == 0 ? "edgees.test.matrix" : "edgees.test.scale";
    s.by_name[s.entries[i].name] = i;
  }
  s.members = {{0, 0.0f, 0}, {0, 0.0f, 0}};
  s.columns = {0, 1};
  s.outputs = {0, 1};
  edgees_session* before = active;
  active = &s;
  Context* ctx = host.init({1 << 20, nullptr, false});
  bool ok = ctx != nullptr;
  Backend* backend = ok ? host.dev_init(&device, nullptr) : nullptr;
  ok = ok && backend && strcmp(host.backend_name(backend), "edgees") == 0;
  if (ok) {
    Tensor* tw = host.set_name(host.new_tensor_2d(ctx, kF32, 32, 4), "edgees.test.matrix");
    Tensor* ts = host.set_name(host.new_tensor_2d(ctx, kF32, 32, 1), "edgees.test.scale");
    Tensor* tx = host.new_tensor_2d(ctx, kF32, 32, 2);
    ok = tw->data && tw->ne[0] == 32 && tw->ne[1] == 4 && tw->nb[1] == 32 * sizeof(float) &&
         strcmp(tw->name, "edgees.test.matrix") == 0;
    if (ok) {
      memcpy(tw->data, w, sizeof w);
      memcpy(ts->data, scale, sizeof scale);
      memcpy(tx->data, x, sizeof x);
      Tensor* y = host.mul_mat(ctx, tw, host.mul(ctx, tx, ts));
      Graph* g = host.new_graph(ctx);
      host.build_forward(g, y);
      ok = supports(&device, y) && supports(&device, y->src[1]) &&
           host.graph_compute(backend, g) == kSuccess;
      for (int c = 0; ok && c < 2; ++c)
        for (int r = 0; ok && r < 4; ++r) {
          double want = 0;
          for (int j = 0; j < 32; ++j) want += double(w[r * 32 + j]) * x[c * 32 + j] * scale[j];
          ok = std::fabs(static_cast<float*>(y->data)[c * 4 + r] - want) < 1e-3;
        }
    }
  }
  if (!ok)
    *why = s.error.empty() ? "a small graph through our backend gave a wrong result" : s.error;
  if (backend) host.backend_free(backend);
  if (ctx) host.free(ctx);
  active = before;
  return ok;
}

// Operations have names but no published count: one of the last ones is made, and its number read.
int last_op() {
  Context* ctx = host.init({1 << 16, nullptr, true});
  if (!ctx) return 0;
  Tensor* t = host.new_tensor_2d(ctx, kF32, 32, 1);
  const int number = host.swiglu_split(ctx, t, t)->op;
  host.free(ctx);
  return number;
}

std::string host_error;

int install(void* library) {
  const char* missing = nullptr;
#define FIND(field, symbol) \
  if (!missing && !find(library, symbol, &host.field)) missing = symbol
  FIND(backend_register, "ggml_backend_register");
  FIND(reg_by_name, "ggml_backend_reg_by_name");
  FIND(dev_by_type, "ggml_backend_dev_by_type");
  FIND(dev_name, "ggml_backend_dev_name");
  FIND(dev_type, "ggml_backend_dev_type");
  FIND(cpu_buffer_type, "ggml_backend_cpu_buffer_type");
  FIND(cpu_buffer_from_ptr, "ggml_backend_cpu_buffer_from_ptr");
  FIND(buft_is_host, "ggml_backend_buft_is_host");
  FIND(dev_init, "ggml_backend_dev_init");
  FIND(backend_name, "ggml_backend_name");
  FIND(backend_free, "ggml_backend_free");
  FIND(graph_compute, "ggml_backend_graph_compute");
  FIND(init, "ggml_init");
  FIND(free, "ggml_free");
  FIND(new_tensor_2d, "ggml_new_tensor_2d");
  FIND(mul_mat, "ggml_mul_mat");
  FIND(mul, "ggml_mul");
  FIND(swiglu_split, "ggml_swiglu_split");
  FIND(set_name, "ggml_set_name");
  FIND(new_graph, "ggml_new_graph");
  FIND(build_forward, "ggml_build_forward_expand");
  FIND(graph_n_nodes, "ggml_graph_n_nodes");
  FIND(graph_node, "ggml_graph_node");
  FIND(op_name, "ggml_op_name");
#undef FIND
  if (missing) {
    host_error = std::string("ggml has no function ") + missing;
    return EDGEES_E_HOST;
  }
  // Operations are found by name: their numbers change from one ggml to the next.
  const struct {
    const char* name;
    int* number;
  } ops[] = {{"NONE", &op_none}, {"MUL_MAT", &op_mul_mat}, {"GET_ROWS", &op_get_rows},
             {"MUL", &op_mul},   {"ADD", &op_add},         {"RESHAPE", &op_reshape},
             {"VIEW", &op_view}, {"PERMUTE", &op_permute}, {"TRANSPOSE", &op_transpose}};
  const int last = last_op();
  if (const char* lacking = find_ops(host.op_name, last)) {
    host_error = std::string("ggml has no operation ") + lacking;
    return EDGEES_E_HOST;
  }
  for (int i = 0; i <= last; ++i) {
    const char* name = host.op_name(i);
    for (const auto& op : ops)
      if (name && strcmp(name, op.name) == 0) *op.number = i;
  }
  for (const auto& op : ops)
    if (*op.number < 0) {
      host_error = std::string("ggml has no operation ") + op.name;
      return EDGEES_E_HOST;
    }
  // ggml's own CPU backend, read through our declarations, must say what ggml says of it.
  Registry* cpu = host.reg_by_name("CPU");
  if (!cpu) {
    host_error = "ggml has no CPU backend";
    return EDGEES_E_HOST;
  }
  if (cpu->api_version != kBackendApi) {
    host_error = "ggml's backend API is version " + std::to_string(cpu->api_version) + ", not " +
                 std::to_string(kBackendApi);
    return EDGEES_E_HOST;
  }
  Device* dev = host.dev_by_type(kCpu);
  if (!dev || dev->reg != cpu || cpu->iface.get_device_count(cpu) < 1 ||
      cpu->iface.get_device(cpu, 0) != dev || dev->iface.get_type(dev) != host.dev_type(dev) ||
      strcmp(dev->iface.get_name(dev), host.dev_name(dev)) != 0) {
    host_error = "ggml's CPU device has another layout than backend API 2";
    return EDGEES_E_HOST;
  }
  Backend* b = host.dev_init(dev, nullptr);
  const bool same = b && b->device == dev && b->iface.get_name &&
                    strcmp(b->iface.get_name(b), host.backend_name(b)) == 0 &&
                    b->iface.graph_compute;
  if (b) host.backend_free(b);
  if (!same) {
    host_error = "ggml's CPU backend has another layout than backend API 2";
    return EDGEES_E_HOST;
  }
  device.iface.get_name = device_name;
  device.iface.get_description = device_description;
  device.iface.get_memory = device_memory;
  device.iface.get_type = device_type;
  device.iface.get_props = device_props;
  device.iface.init_backend = device_init;
  device.iface.get_buffer_type = device_buffer_type;
  device.iface.buffer_from_host_ptr = device_host_ptr;
  device.iface.supports_op = supports;
  device.iface.supports_buft = device_buft;
  device.reg = &registry;
  registry.api_version = kBackendApi;
  registry.iface.get_name = reg_name;
  registry.iface.get_device_count = reg_count;
  registry.iface.get_device = reg_device;
  if (!self_test(&host_error)) return EDGEES_E_HOST;
  host.backend_register(&registry);
  return 0;
}

}  // namespace
}  // namespace edgees

extern "C" {

int edgees_llama_install(void* library) {
  static std::once_flag once;
  static int result = 0;
  std::call_once(once, [&] { result = edgees::install(library); });
  return result;
}
const char* edgees_llama_error(void) { return edgees::host_error.c_str(); }

edgees_session* edgees_session_new(int tensors, int kind, int rank) {
  edgees_session* s = new edgees_session(tensors);
  s->noise = {kind, rank};
  return s;
}
void edgees_session_free(edgees_session* s) {
  if (edgees::active == s) edgees::active = nullptr;
  delete s;
}
void edgees_session_activate(edgees_session* s) { edgees::active = s; }
int edgees_session_tensor(edgees_session* s, int index, const char* source, int vector,
                          const edgees_tensor* t) {
  if (index < 0 || index >= static_cast<int>(s->entries.size())) return EDGEES_E_ARGUMENT;
  edgees::Entry& e = s->entries[index];
  e.t = *t;
  e.vector = vector != 0;
  e.name = source;
  s->by_name[e.name] = index;
  return 0;
}
int edgees_session_batch(edgees_session* s, int members, const edgees_member* member,
                         int64_t tokens, const int32_t* token, const int32_t* owner,
                         int64_t outputs, const int32_t* output_owner) {
  for (int64_t i = 0; i < tokens; ++i)
    if (owner[i] < 0 || owner[i] >= members) return EDGEES_E_COLUMNS;
  for (int64_t i = 0; i < outputs; ++i)
    if (output_owner[i] < 0 || output_owner[i] >= members) return EDGEES_E_COLUMNS;
  s->members.assign(member, member + members);
  s->tokens.assign(token, token + tokens);
  s->columns.assign(owner, owner + tokens);
  s->outputs.assign(output_owner, output_owner + outputs);
  s->error.clear();
  return 0;
}
const char* edgees_session_error(const edgees_session* s) { return s->error.c_str(); }
int64_t edgees_session_seen(const edgees_session* s, int index) { return s->entries[index].seen; }
const char* edgees_session_unclaimed(const edgees_session* s, int index) {
  return s->entries[index].unclaimed.c_str();
}

// Natural log-probability of token[i] under logits row i, and the most likely token of each row.
int edgees_logprob(const float* const* logits, int64_t rows, int64_t vocabulary,
                   const int32_t* token, double* out, int32_t* best) {
  std::atomic<int> bad{0};
  edgees::parallel_for(rows, [&](int64_t i, int) {
    const float* x = logits[i];
    float top = x[0];
    int32_t at = 0;
    for (int64_t j = 1; j < vocabulary; ++j)
      if (x[j] > top) {
        top = x[j];
        at = static_cast<int32_t>(j);
      }
    if (best) best[i] = at;
    if (!out) return;
    if (token[i] < 0 || token[i] >= vocabulary) {
      bad = 1;
      return;
    }
    double total = 0;
    for (int64_t j = 0; j < vocabulary; ++j) total += std::exp(x[j] - top);
    out[i] = static_cast<double>(x[token[i]]) - top - std::log(total);
  });
  return bad ? EDGEES_E_ARGUMENT : 0;
}
}
