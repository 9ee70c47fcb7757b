// The few structures of ggml that a backend needs, declared by us: the llama-cpp-python wheel ships
// ggml.h but not ggml-backend-impl.h, and a wheel of ours must build without llama.cpp. Layout of
// backend API version 2; `accel.cpp` reads ggml's own CPU backend through these declarations and
// runs a small graph before it trusts them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace edgees {
namespace ggml {

constexpr int kBackendApi = 2;
constexpr int kDims = 4, kSources = 10, kParamWords = 16, kName = 64;

struct Buffer;
struct BufferType;
struct Context;
struct Graph;
struct Backend;
struct Device;
struct Registry;
struct Event;
struct Plan;
struct OptimizeParams;

struct Tensor {
  int32_t type;
  Buffer* buffer;
  int64_t ne[kDims];
  size_t nb[kDims];
  int32_t op;
  int32_t op_params[kParamWords];
  int32_t flags;
  Tensor* src[kSources];
  Tensor* view_src;
  size_t view_offs;
  void* data;
  char name[kName];
  void* extra;
  char padding[8];
};
static_assert(offsetof(Tensor, ne) == 16 && offsetof(Tensor, nb) == 48, "ggml_tensor");
static_assert(offsetof(Tensor, op) == 80 && offsetof(Tensor, src) == 152, "ggml_tensor");
static_assert(offsetof(Tensor, data) == 248 && offsetof(Tensor, name) == 256, "ggml_tensor");
static_assert(sizeof(Tensor) == 336, "ggml_tensor");

struct BackendInterface {
  const char* (*get_name)(Backend*);
  void (*free)(Backend*);
  void (*set_tensor_async)(Backend*, Tensor*, const void*, size_t, size_t);
  void (*get_tensor_async)(Backend*, const Tensor*, void*, size_t, size_t);
  void (*set_tensor_2d_async)(Backend*, Tensor*, const void*, size_t, size_t, size_t, size_t,
                              size_t);
  void (*get_tensor_2d_async)(Backend*, const Tensor*, void*, size_t, size_t, size_t, size_t,
                              size_t);
  bool (*cpy_tensor_async)(Backend*, Backend*, const Tensor*, Tensor*);
  void (*synchronize)(Backend*);
  Plan* (*graph_plan_create)(Backend*, const Graph*);
  void (*graph_plan_free)(Backend*, Plan*);
  void (*graph_plan_update)(Backend*, Plan*, const Graph*);
  int (*graph_plan_compute)(Backend*, Plan*);
  int (*graph_compute)(Backend*, Graph*);
  void (*event_record)(Backend*, Event*);
  void (*event_wait)(Backend*, Event*);
  void (*graph_optimize)(Backend*, Graph*, OptimizeParams*);
};
struct Backend {
  const uint8_t (*guid)[16];
  BackendInterface iface;
  Device* device;
  void* context;
};

struct DeviceCaps {
  bool async, host_buffer, buffer_from_host_ptr, events, mmap_support;
};
struct DeviceProps {
  const char* name;
  const char* description;
  size_t memory_free, memory_total;
  int type;
  const char* device_id;
  DeviceCaps caps;
};
struct DeviceInterface {
  const char* (*get_name)(Device*);
  const char* (*get_description)(Device*);
  void (*get_memory)(Device*, size_t*, size_t*);
  int (*get_type)(Device*);
  void (*get_props)(Device*, DeviceProps*);
  Backend* (*init_backend)(Device*, const char*);
  BufferType* (*get_buffer_type)(Device*);
  BufferType* (*get_host_buffer_type)(Device*);
  Buffer* (*buffer_from_host_ptr)(Device*, void*, size_t, size_t);
  bool (*supports_op)(Device*, const Tensor*);
  bool (*supports_buft)(Device*, BufferType*);
  bool (*offload_op)(Device*, const Tensor*);
  Event* (*event_new)(Device*);
  void (*event_free)(Device*, Event*);
  void (*event_synchronize)(Device*, Event*);
};
struct Device {
  DeviceInterface iface;
  Registry* reg;
  void* context;
};

struct RegistryInterface {
  const char* (*get_name)(Registry*);
  size_t (*get_device_count)(Registry*);
  Device* (*get_device)(Registry*, size_t);
  void* (*get_proc_address)(Registry*, const char*);
};
struct Registry {
  int api_version;
  RegistryInterface iface;
  void* context;
};

enum DeviceType { kCpu = 0, kAccel = 3 };
enum Status { kFailed = -1, kSuccess = 0 };
enum Type { kF32 = 0, kF16 = 1, kI32 = 26, kI64 = 27 };

struct InitParams {
  size_t mem_size;
  void* mem_buffer;
  bool no_alloc;
};

}  // namespace ggml
}  // namespace edgees
