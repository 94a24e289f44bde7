// HCCL between one rank and nobody: what there is to reduce is there already. More than one rank is refused.
// C++, since the header is.
#include <hccl/hccl.h>

#include <cstring>

HcclResult HcclGetRootInfo(HcclRootInfo *root) {
    std::memset(root, 0, sizeof *root);
    return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *, uint32_t, HcclComm *comm) {
    static char communicator;
    *comm = &communicator;
    return ranks == 1 ? HCCL_SUCCESS : HCCL_E_NOT_SUPPORT;
}

HcclResult HcclCommInitRootInfoConfig(
    uint32_t ranks, const HcclRootInfo *root, uint32_t rank, const HcclCommConfig *, HcclComm *comm) {
    return HcclCommInitRootInfo(ranks, root, rank, comm);
}

HcclResult HcclCommDestroy(HcclComm) { return HCCL_SUCCESS; }

HcclResult HcclGetCommAsyncError(HcclComm, HcclResult *error) {
    *error = HCCL_SUCCESS;
    return HCCL_SUCCESS;
}

HcclResult HcclAllReduce(void *from, void *to, uint64_t, HcclDataType, HcclReduceOp, HcclComm, aclrtStream) {
    return from == to ? HCCL_SUCCESS : HCCL_E_NOT_SUPPORT;
}
