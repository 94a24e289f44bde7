// The part of CANN's runtime that keeps memory, streams and events, with host memory as the device's.
//
// Work is done when the call that submits it returns, so nothing waits and an event is a reading of the clock. Nothing
// computes: every function that would is left out, and so fails. New memory is all ones, which are NaN in floating
// point, so that a result nobody wrote is seen.
#define _GNU_SOURCE
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { DEVICES = 1, OUT_OF_MEMORY = ACL_ERROR_RT_MEMORY_ALLOCATION, WRONG_DEVICE = ACL_ERROR_RT_INVALID_DEVICEID };
static const size_t CAPACITY = (size_t)8 << 30;
static const size_t PAGE = 512;  // what a device aligns to

static size_t used;
static __thread int32_t current = -1;  // a thread has no device until it sets one
static char context;  // one for all: its address is asked for, and never read

// An area of addresses: handed out by aclrtMalloc, reserved, or mapped.
typedef struct Area {
    void *start;
    size_t size;
    struct Area *next;
} Area;

static Area *allocated, *reserved, *mapped;

static void note(Area **areas, void *start, size_t size) {
    Area *area = malloc(sizeof *area);
    *area = (Area){start, size, *areas};
    *areas = area;
}

static size_t forget(Area **areas, void *start) {
    for (Area **link = areas; *link; link = &(*link)->next) {
        Area *area = *link;
        if (area->start == start) {
            size_t size = area->size;
            *link = area->next;
            free(area);
            return size;
        }
    }
    return 0;
}

static aclError take(size_t size) {
    if (used + size > CAPACITY) return OUT_OF_MEMORY;
    used += size;
    return ACL_SUCCESS;
}

aclError aclInit(const char *config) { return ACL_SUCCESS; }
aclError aclFinalize(void) { return ACL_SUCCESS; }
const char *aclGetRecentErrMsg(void) { return "host memory stands in for an NPU: it computes nothing by itself"; }
void aclAppLog(aclLogLevel level, const char *function, const char *file, uint32_t line, const char *format, ...) {}

// Devices

aclError aclrtGetDeviceCount(uint32_t *count) {
    const char *listed = getenv("ASCEND_RT_VISIBLE_DEVICES");
    const int first = !listed || (listed[0] == '0' && (listed[1] == 0 || listed[1] == ','));
    *count = first ? DEVICES : 0;
    return ACL_SUCCESS;
}
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
aclError aclrtGetDevice(int32_t *device) {
    *device = current;
    return current < 0 ? ACL_ERROR_RT_CONTEXT_NULL : ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t device) { return ACL_SUCCESS; }
aclError aclrtSynchronizeDevice(void) { return ACL_SUCCESS; }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return ACL_SUCCESS; }
aclError aclrtGetCurrentContext(aclrtContext *where) { *where = &context; return ACL_SUCCESS; }
aclError aclrtSetCurrentContext(aclrtContext which) { return ACL_SUCCESS; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) { return ACL_SUCCESS; }

aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= DEVICES) return WRONG_DEVICE;
    current = device;
    return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    *active = 1;
    return ACL_SUCCESS;
}

// Memory

aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *free_bytes, size_t *total) {
    *free_bytes = CAPACITY - used;
    *total = CAPACITY;
    return ACL_SUCCESS;
}

aclError aclrtMalloc(void **address, size_t size, aclrtMemMallocPolicy policy) {
    size = (size + PAGE - 1) / PAGE * PAGE;
    if (take(size)) return OUT_OF_MEMORY;
    *address = aligned_alloc(PAGE, size);
    memset(*address, 0xFF, size);
    note(&allocated, *address, size);
    return ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void **address, size_t size, aclrtMemMallocPolicy policy) {
    return aclrtMalloc(address, size, policy);
}

aclError aclrtFree(void *address) {
    used -= forget(&allocated, address);
    free(address);
    return ACL_SUCCESS;
}

aclError aclrtMallocHost(void **address, size_t size) {
    *address = aligned_alloc(PAGE, (size + PAGE - 1) / PAGE * PAGE);
    return ACL_SUCCESS;
}

aclError aclrtFreeHost(void *address) { free(address); return ACL_SUCCESS; }

aclError aclrtMemcpy(void *to, size_t most, const void *from, size_t count, aclrtMemcpyKind kind) {
    memmove(to, from, count);
    return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(
    void *to, size_t most, const void *from, size_t count, aclrtMemcpyKind kind, aclrtStream stream) {
    return aclrtMemcpy(to, most, from, count, kind);
}

aclError aclrtMemset(void *address, size_t most, int32_t value, size_t count) {
    memset(address, value, count);
    return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *address, size_t most, int32_t value, size_t count, aclrtStream stream) {
    return aclrtMemset(address, most, value, count);
}

// Segments that grow: addresses are reserved first, and memory is put behind them in pieces.

aclError aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *wanted, uint64_t flags) {
    *address = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*address == MAP_FAILED) return OUT_OF_MEMORY;
    note(&reserved, *address, size);
    return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void *address) {
    munmap(address, forget(&reserved, address));
    return ACL_SUCCESS;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *kind, uint64_t flags) {
    if (take(size)) return OUT_OF_MEMORY;
    size_t *piece = malloc(sizeof *piece);
    *piece = size;
    *handle = piece;
    return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    used -= *(size_t *)handle;
    free(handle);
    return ACL_SUCCESS;
}

aclError aclrtMapMem(void *address, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
    if (mprotect(address, size, PROT_READ | PROT_WRITE)) return OUT_OF_MEMORY;
    memset(address, 0xFF, size);
    note(&mapped, address, size);
    return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void *address) {
    size_t size = forget(&mapped, address);
    madvise(address, size, MADV_DONTNEED);
    mprotect(address, size, PROT_NONE);
    return ACL_SUCCESS;
}

// Streams and events

aclError aclrtCreateStream(aclrtStream *stream) { *stream = malloc(1); return ACL_SUCCESS; }
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag) {
    return aclrtCreateStream(stream);
}
aclError aclrtDestroyStream(aclrtStream stream) { free(stream); return ACL_SUCCESS; }
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtSynchronizeStream(aclrtStream stream) { return ACL_SUCCESS; }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) { return ACL_SUCCESS; }
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) { return ACL_SUCCESS; }
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) {
    *event = calloc(1, sizeof(struct timespec));
    return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
aclError aclrtDestroyEvent(aclrtEvent event) { free(event); return ACL_SUCCESS; }
aclError aclrtSynchronizeEvent(aclrtEvent event) { return ACL_SUCCESS; }
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    return clock_gettime(CLOCK_MONOTONIC, event) ? ACL_ERROR_RT_PARAM_INVALID : ACL_SUCCESS;
}
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    const struct timespec *from = start, *to = end;
    *milliseconds = (to->tv_sec - from->tv_sec) * 1e3f + (to->tv_nsec - from->tv_nsec) / 1e6f;
    return ACL_SUCCESS;
}

// Options of the compiler of operators, which torch-npu sets when it starts, and asks for when it allows fp32 to be cut

size_t aclGetCompileoptSize(aclCompileOpt option) { return sizeof "must_keep_origin_dtype"; }
aclError aclSetCompileopt(aclCompileOpt option, const char *value) { return ACL_SUCCESS; }
aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
    strncpy(value, "must_keep_origin_dtype", length);
    return ACL_SUCCESS;
}

static int64_t parameters[16];  // whether to be deterministic, and the like: kept for whoever asks

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    *value = parameters[option % 16];
    return ACL_SUCCESS;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    parameters[option % 16] = value;
    return ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

// What torch-npu tells every device when it starts

aclError aclrtSetOpExecuteTimeOut(uint32_t seconds) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t seconds) { return ACL_SUCCESS; }
