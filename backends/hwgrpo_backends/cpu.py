"""The host processor: a backend like the others, for tests, small models and machines without an accelerator."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from hwgrpo_backends.backend import Backend, EnvVar, Verdict
from hwgrpo_backends.probing import torch_problem

if TYPE_CHECKING:
    import torch

    from hwgrpo_backends.facts import Facts


def probe(facts: Facts) -> Verdict:
    """Judge whether torch can be imported: there is nothing else to be missing."""
    if problem := torch_problem(facts):
        return Verdict(state="unusable", reason=problem[0], fix=problem[1], hardware="present")
    where = f"torch {facts.torch_version} on {facts.machine}"
    if facts.torch is None:
        return Verdict(
            state="unverified", reason=f"{where}; import not tried yet", devices=1, claimed=True, hardware="present"
        )
    return Verdict(state="ok", reason=where, devices=1, claimed=True, hardware="present")


def arch(index: int) -> str:
    """Return the machine and the vector instructions torch uses on it, as "x86_64-avx512"."""
    import torch

    return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability().lower()}"


def compute_dtypes(index: int) -> tuple[torch.dtype, ...]:
    """Return fp32, then bf16: processors without bf16 instructions compute it, at a loss."""
    import torch

    return torch.float32, torch.bfloat16


OUT_OF_MEMORY = {
    r"DefaultCPUAllocator: (can't|not enough memory)": "torch's allocator of host memory raises a plain RuntimeError",
}

COMMON = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": EnvVar(
        value="64",
        why="in bfloat16 each decode step multiplies new shapes, and oneDNN keeps half a MiB of code for each of 1,024",
        source="oneDNN, developer guide, primitive cache",
    ),
    "GOMP_SPINCOUNT": EnvVar(
        value="5000",
        why="a thread that waits for the others of an operation spins 300,000 times. Where a program beside it needs "
        "the core, the thread that is waited for does not run meanwhile: a step takes several times as long",
        source="GCC, libgomp manual, GOMP_SPINCOUNT",
    ),
}

BACKEND = Backend(
    name="cpu",
    device_type="cpu",
    comm="gloo",
    kernels=("torch",),
    attention=("sdpa", "eager"),
    rollout=("local",),
    torch_build="the CPU build of torch and hwgrpo[cpu]",
    probe=probe,
    arch=arch,
    compute_dtypes=compute_dtypes,
    env_train=COMMON,
    env_rollout=COMMON,
    out_of_memory=OUT_OF_MEMORY,
)
