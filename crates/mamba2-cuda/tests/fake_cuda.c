// A CUDA driver without a GPU, for tests: device memory is host memory, kernels do nothing, every call is written down.
// Compiled by tests/fake_driver.rs and by the command line's tests/fake_gpu.rs. Definitions given on the command line change what it plays:
//   REFUSE_SET       a graph's parameters cannot be set
//   OMIT_GRAPHS      lacks cuGraphInstantiateWithFlags, as an old driver does
//   INIT_STATUS=n    cuInit fails with n (34: stub library, 100: no device)
//   MAJOR, MINOR     compute capability
//   DEVICES          number of devices
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef INIT_STATUS
#define INIT_STATUS 0
#endif
#ifndef MAJOR
#define MAJOR 9
#endif
#ifndef MINOR
#define MINOR 0
#endif
#ifndef DEVICES
#define DEVICES 2
#endif

typedef unsigned long long Address;
typedef void* Handle;

static char log_text[1 << 16];
static size_t log_length;
static Handle stack[64];
static int depth;
static int capturing;
// A graph is the kernels that were launched in a capture; a node points to its function.
typedef struct { size_t count; Handle functions[8]; } Graph;
static Graph* captured;
static Address last_set;

static int note(const char* call) {
  size_t n = strlen(call);
  if (log_length + n + 2 < sizeof log_text) {
    memcpy(log_text + log_length, call, n);
    log_length += n;
    log_text[log_length++] = ' ';
    log_text[log_length] = 0;
  }
  return 0;
}
#define NOTE note(__func__)

// For the tests.
const char* fake_log(void) { return log_text; }
void fake_reset(void) { log_length = 0; log_text[0] = 0; }
int fake_depth(void) { return depth; }
// First word of the parameters that were set last: the address of dt, or of the state.
Address fake_last_set(void) { return last_set; }

int cuInit(unsigned flags) { return INIT_STATUS; }
int cuDriverGetVersion(int* v) { *v = 12040; return 0; }
int cuGetErrorString(int e, const char** s) { *s = e == 34 ? "CUDA driver is a stub library" : "made up by the test"; return 0; }
int cuDeviceGetCount(int* n) { *n = DEVICES; return 0; }
int cuDeviceGet(int* d, int ordinal) { *d = ordinal; return ordinal < DEVICES ? 0 : 101; }
int cuDeviceGetName(char* s, int n, int d) { snprintf(s, n, "Fake %d", d); return 0; }
int cuDeviceGetPCIBusId(char* s, int n, int d) { snprintf(s, n, "0000:0%d:00.0", d); return 0; }
int cuDeviceGetUuid_v2(char* u, int d) { memset(u, d, 16); return 0; }
int cuDeviceGetAttribute(int* v, int which, int d) {
  switch (which) {
    case 75: *v = MAJOR; break;
    case 76: *v = MINOR; break;
    case 16: *v = 132; break;
    case 97: *v = 227 * 1024; break;
    case 38: *v = 50 << 20; break;
    default: *v = 0;
  }
  return 0;
}
int cuDevicePrimaryCtxRetain(Handle* c, int d) { *c = (Handle)(size_t)(0x1000 + d); return NOTE; }
int cuDevicePrimaryCtxRelease_v2(int d) { return NOTE; }
int cuCtxGetCurrent(Handle* c) { *c = depth > 0 ? stack[depth - 1] : 0; return NOTE; }
int cuCtxPushCurrent_v2(Handle c) { stack[depth++] = c; return NOTE; }
int cuCtxPopCurrent_v2(Handle* c) { *c = stack[--depth]; return NOTE; }
int cuMemAlloc_v2(Address* p, size_t n) {
  NOTE;
  if (n > (size_t)1 << 36) return 2;
  *p = (Address)(size_t)aligned_alloc(512, (n + 511) / 512 * 512);
  return 0;
}
int cuMemFree_v2(Address p) { free((void*)(size_t)p); return NOTE; }
int cuMemGetInfo_v2(size_t* f, size_t* t) { *f = *t = (size_t)1 << 36; return 0; }
int cuMemcpyHtoD_v2(Address d, const void* s, size_t n) { memcpy((void*)(size_t)d, s, n); return NOTE; }
int cuMemcpyDtoH_v2(void* d, Address s, size_t n) { memcpy(d, (void*)(size_t)s, n); return NOTE; }
// What is captured is not done.
int cuMemcpyDtoDAsync_v2(Address d, Address s, size_t n, Handle st) { if (!capturing) memcpy((void*)(size_t)d, (void*)(size_t)s, n); return NOTE; }
int cuMemsetD8Async(Address d, unsigned char v, size_t n, Handle st) { if (!capturing) memset((void*)(size_t)d, v, n); return NOTE; }
int cuModuleLoadData(Handle* m, const void* image) {
  NOTE;
  if (memcmp(image, "refuse", 6) == 0) return 209;
  *m = (Handle)0x2000;
  return 0;
}
int cuModuleUnload(Handle m) { return NOTE; }
int cuModuleGetFunction(Handle* f, Handle m, const char* name) { static size_t next = 0x3000; *f = (Handle)(next += 16); return NOTE; }
int cuFuncGetAttribute(int* v, int a, Handle f) { *v = 0; return NOTE; }
int cuFuncSetAttribute(Handle f, int a, int v) { return NOTE; }
int cuLaunchKernelEx(const void* config, Handle f, void** p, void** e) {
  if (capturing && captured->count < 8) captured->functions[captured->count++] = f;
  return NOTE;
}
int cuTensorMapEncodeTiled(void* map, int dtype, unsigned rank, void* address, const unsigned long long* dims, const unsigned long long* strides, const unsigned* box, const unsigned* steps, int i, int s, int l, int f) {
  NOTE;
  for (unsigned axis = 0; axis + 1 < rank; ++axis)
    if (strides[axis] == 0 || strides[axis] % 16 || strides[axis] >> 40) return 1;
  return (size_t)address % 16 ? 1 : 0;
}
int cuStreamCreate(Handle* s, unsigned flags) { static size_t next = 0x4000; *s = (Handle)(next += 16); return NOTE; }
int cuStreamDestroy_v2(Handle s) { return NOTE; }
int cuStreamSynchronize(Handle s) { NOTE; return capturing ? 900 : 0; }
int cuStreamWaitEvent(Handle s, Handle e, unsigned f) { return NOTE; }
int cuStreamBeginCapture_v2(Handle s, int mode) { capturing = 1; captured = calloc(1, sizeof *captured); return NOTE; }
int cuStreamEndCapture(Handle s, Handle* g) { capturing = 0; *g = captured; return NOTE; }
int cuStreamIsCapturing(Handle s, int* status) { *status = capturing; return NOTE; }
int cuGraphDestroy(Handle g) { free(g); return NOTE; }
// The last launch first: a driver may give nodes in any order.
int cuGraphGetNodes(Handle g, Handle* nodes, size_t* count) {
  Graph* graph = g;
  for (size_t i = 0; nodes && i < *count && i < graph->count; ++i) nodes[i] = &graph->functions[graph->count - 1 - i];
  *count = graph->count;
  return NOTE;
}
typedef struct { Handle function; unsigned sizes[7]; void** parameters; void* more[3]; } NodeParams;
int cuGraphKernelNodeGetParams_v2(Handle node, NodeParams* p) { memset(p, 0, sizeof *p); p->function = *(Handle*)node; return NOTE; }
int cuGraphExecKernelNodeSetParams_v2(Handle x, Handle node, const NodeParams* p) {
  NOTE;
#ifdef REFUSE_SET
  return 801;
#endif
  if (p->function != *(Handle*)node) return 1;
  memcpy(&last_set, p->parameters[0], sizeof last_set);
  return 0;
}
#ifndef OMIT_GRAPHS
int cuGraphInstantiateWithFlags(Handle* x, Handle g, unsigned long long f) { *x = (Handle)0x6000; return NOTE; }
#endif
int cuGraphLaunch(Handle x, Handle s) { return NOTE; }
int cuGraphExecDestroy(Handle x) { return NOTE; }
int cuEventCreate(Handle* e, unsigned f) { *e = (Handle)0x7000; return NOTE; }
int cuEventDestroy_v2(Handle e) { return NOTE; }
int cuEventRecord(Handle e, Handle s) { return NOTE; }
int cuEventSynchronize(Handle e) { return NOTE; }
int cuEventQuery(Handle e) { return 600; }
int cuEventElapsedTime(float* ms, Handle a, Handle b) { *ms = 0.25f; return NOTE; }
