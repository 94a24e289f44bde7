"""AMD GPUs through torch's ROCm builds. torch calls them "cuda"; users and this package do not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hwgrpo_backends.backend import Backend, EnvVar, Verdict
from hwgrpo_backends.cuda import INTERFACE
from hwgrpo_backends.peaks import AMD
from hwgrpo_backends.probing import judge, leave_out, torch_problem

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from hwgrpo_backends.facts import Facts
    from hwgrpo_backends.graphs import Recording

INSTALL = "a ROCm build of torch (see https://pytorch.org/get-started/locally) and hwgrpo[rocm]"
RENDER_NODES = "dri/renderD*"
DRIVER = ("sys/class/kfd/kfd",)
ACCESS = "start the container with --device=/dev/kfd --device=/dev/dri --group-add video (Kubernetes: amd.com/gpu)"
# Before ROCm 7.2 the library was a build of libhsa-runtime64 (roc4wsl). Source: AMD, Use ROCm on Radeon and Ryzen, WSL.
WSL_FILES = ("opt/rocm/lib/librocdxg.so*", "opt/rocm/lib/libhsa-runtime64.so*")
WINDOWS_FIX = (
    "update the AMD driver of Windows to one for WSL, install ROCm with librocdxg in WSL (/opt/rocm/lib/librocdxg.so), "
    "and set HSA_ENABLE_DXG_DETECTION=1, which ROCm needs before 7.13"
)
GENERIC = {
    "gfx9-generic": ("gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c"),
    "gfx9-4-generic": ("gfx940", "gfx941", "gfx942", "gfx950"),
    "gfx10-1-generic": ("gfx1010", "gfx1011", "gfx1012", "gfx1013"),
    "gfx10-3-generic": ("gfx1030", "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036"),
    "gfx11-generic": ("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"),
    "gfx12-generic": ("gfx1200", "gfx1201"),
}
"""Target for a family -> its chips. Source: LLVM, User Guide for AMDGPU Backend, generic processors."""

# Sources: commits of verl-project/verl (2026-08-22) and ROCm/clr.
_AMD = "AMD, vLLM V1 performance optimization, 2025-10-22"
COMMON = {
    "HSA_NO_SCRATCH_RECLAIM": EnvVar(
        value="1",
        why="without it the runtime takes scratch memory back between kernels, which stalls RCCL and GEMM kernels; "
        "on old firmware newer RCCL ends at its start without it",
        until="the GPU's MEC firmware is 177 or newer (ROCm 6.4.3 and its driver)",
        source="ROCm 6.4.3: release notes, AMDGPU driver updates; rccl: pull request 1867; verl 1dda039: "
        "verl/trainer/constants_ppo.py:98",
    ),
}
# hipBLASLt and rocBLAS are not known to need a variable for it.
DETERMINISTIC = {
    "FLASH_ATTENTION_DETERMINISTIC": EnvVar(
        value="1",
        why="the backward pass of flash-attn adds in the order in which blocks finish, if transformers lets it",
        source="transformers: modeling_flash_attention_utils.py",
    ),
}
OPTIONAL = {
    **INTERFACE,
    "NCCL_MIN_NCHANNELS": EnvVar(
        value="112",
        why="eight MI300X of one host: more channels of RCCL, if a step waits for collectives. They occupy compute "
        "units that kernels beside them lack; verl's image of ROCm 7.14 no longer sets it",
        source=f"{_AMD}; verl 1dda039: docker/rocm/Dockerfile.rocm6:112",
    ),
    "GPU_MAX_HW_QUEUES": EnvVar(
        value="2",
        why="several nodes: verl's Slurm script for AMD GPUs has it, without a reason; HIP's default is 4 hardware "
        "queues. Compare",
        source="verl 1dda039: docs/start/multinode.rst:590; clr 2e8f505: rocclr/utils/flags.hpp",
    ),
    "HIP_FORCE_DEV_KERNARG": EnvVar(
        value="1",
        why="no longer needed: kernel arguments in device memory, 2 to 3 us less per launch, are HIP's default now",
        source=f"clr 2e8f505: rocclr/utils/flags.hpp; {_AMD}",
    ),
    "VLLM_ROCM_USE_AITER": EnvVar(
        value="1",
        why="AMD recommends AITER's kernels on MI300X and MI350X for a rollout engine; needs the package aiter. "
        "Off, as in vLLM: other kernels than the trainer's widen the gap of log-probs (watch it), and mixtures "
        "of experts then keep shuffled weights. VLLM_ROCM_USE_AITER_MHA=0, _MOE=0, _LINEAR=0 and _RMSNORM=0 "
        "take single kernels out",
        source=f"{_AMD}; vllm 0.32.0: vllm/envs.py:1269, fused_moe/oracle/unquantized.py:459",
    ),
    "PYTORCH_ALLOC_CONF": EnvVar(
        value="expandable_segments:True",
        why="less fragmentation; PYTORCH_HIP_ALLOC_CONF is its older name. Not set: unproven on ROCm beside vLLM's "
        "sleep mode, which shares the process of rollout.engine=vllm; a vllm_server with tensor parallelism "
        "then needs disable_custom_all_reduce in rollout.engine_kwargs",
        source="verl 1dda039: docker/rocm/Dockerfile.rocm:116, docs/amd_tutorial/amd_quick_start.rst:149",
    ),
}

OUT_OF_MEMORY = {
    r"HIP (out of memory|error: out of memory)": "the HIP runtime, outside torch's allocator",
    r"hipErrorOutOfMemory": "the HIP runtime, by the name of its error",
    r"HIP(BLAS|BLASLT|SOLVER)_STATUS_ALLOC_FAILED|rocblas_status_memory_error": "a ROCm library without workspace",
    r"(HIP|Cuda) failure (2 )?'out of memory'": "RCCL, for its buffers",
    r"Triton Error \[HIP\]: .*out of memory": "Triton, when it loads a kernel",
}


def probe(facts: Facts) -> Verdict:
    """Judge from the torch build, /dev/kfd with its topology and, when tier 1 ran, torch's facts."""
    claimed = facts.torch_build == "rocm"
    problem = torch_problem(facts)
    if facts.torch_version is not None and not claimed:
        problem = f"torch {facts.torch_version} is not a ROCm build", f"install {INSTALL}"
    # /dev/kfd exists on hosts without a GPU too; the topology counts GPUs where it can be read.
    present = (1 if facts.kfd_gpus is None else facts.kfd_gpus) if facts.nodes("kfd") else 0
    verdict = judge(
        facts,
        BACKEND,
        chip="an AMD GPU",
        nodes=facts.nodes("kfd"),
        present=present,
        counted=facts.kfd_gpus is not None,
        where="/dev/kfd",
        claimed=claimed,
        problem=problem,
        driver=() if facts.kfd_gpus == 0 else facts.drivers(DRIVER),
        access=ACCESS,
        windows_fix=WINDOWS_FIX,
        broken_fix=lambda _: "check rocminfo, the amdgpu driver, and that the container has /dev/kfd and /dev/dri",
    )
    device = facts.torch.devices.get("cuda") if facts.torch else None
    if verdict.state == "ok" and device and device.built_for:
        served = {*device.built_for, *(chip for target in device.built_for for chip in GENERIC.get(target, ()))}
        if foreign := sorted(set(device.archs) - served):
            return dataclasses.replace(
                verdict,
                state="unusable",
                devices=0,
                reason=f"torch {facts.torch_version} has no kernels for {', '.join(foreign)} ({verdict.reason})",
                fix=leave_out("HIP_VISIBLE_DEVICES", foreign, device.archs),
            )
    return verdict


def arch(index: int) -> str:
    """Return the GPU target of device `index`, as "gfx942"."""
    import torch

    return torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]


def compute_dtypes(index: int) -> tuple[torch.dtype, ...]:
    """Return the dtypes device `index` computes in: every GPU that ROCm builds of torch support has bf16."""
    import torch

    return torch.bfloat16, torch.float16, torch.float32


def mark(name: str) -> AbstractContextManager[None]:
    """Name a range for rocprof, through torch's names for CUDA."""
    from hwgrpo_backends.markers import nvtx

    return nvtx(name)


def record(work: Callable[[], Any]) -> Recording:
    """Record work as a HIP graph."""
    from hwgrpo_backends.graphs import CudaGraph

    return CudaGraph(work)


BACKEND = Backend(
    name="rocm",
    device_type="cuda",
    visible_env="HIP_VISIBLE_DEVICES",
    # ROCR filters and renumbers first, HIP (or its alias) then filters the rest: the same list in both can hide
    # every GPU.
    filters=("ROCR_VISIBLE_DEVICES",),
    conflicts=("CUDA_VISIBLE_DEVICES",),
    device_nodes=("kfd",),
    companion_nodes=(RENDER_NODES,),
    driver_files=DRIVER,
    wsl_files=WSL_FILES,
    comm="nccl",  # the name under which torch has RCCL
    kernels=("triton", "torch"),
    # AITER's comes from the hub; ROCm's flash-attn package (Composable Kernel, or AITER's Triton) is flash_attention_2
    attention=("kernels-community/aiter-flash-attn", "flash_attention_2", "sdpa", "eager"),
    rollout=("vllm", "vllm_server", "local"),
    env_train=COMMON,
    env_rollout=COMMON,
    env_deterministic=DETERMINISTIC,
    env_optional=OPTIONAL,
    torch_build=INSTALL,
    probe=probe,
    arch=arch,
    compute_dtypes=compute_dtypes,
    out_of_memory=OUT_OF_MEMORY,
    chips=AMD,
    mark=mark,
    record=record,
)
