// CANN on a host without an NPU: it can be loaded and asked, and there is no device.
#include <acl/acl.h>

aclError aclInit(const char *config) { return ACL_SUCCESS; }
aclError aclFinalize(void) { return ACL_SUCCESS; }
aclError aclrtGetDeviceCount(uint32_t *count) { *count = 0; return ACL_SUCCESS; }
const char *aclrtGetSocName(void) { return NULL; }
const char *aclGetRecentErrMsg(void) { return "these are no libraries of CANN: nothing can be computed"; }
