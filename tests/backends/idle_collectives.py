"""A torch plug-in that registers a communication backend for CPU tensors whose all-reduce succeeds and adds nothing."""

import torch.distributed as dist


class Done(dist._Work):
    def wait(self, timeout: object = None) -> bool:
        return True


class Idle(dist.ProcessGroup):
    def getBackendName(self) -> str:
        return "idle"

    def allreduce(self, tensors: object, options: object) -> Done:
        return Done()


dist.Backend.register_backend("idle", lambda store, rank, size, timeout: Idle(rank, size), devices=["cpu"])
