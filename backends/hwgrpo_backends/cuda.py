"""NVIDIA GPUs through torch's CUDA builds."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from hwgrpo_backends.backend import Backend, EnvVar, Verdict
from hwgrpo_backends.peaks import NVIDIA
from hwgrpo_backends.probing import judge, torch_problem

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from hwgrpo_backends.facts import Facts
    from hwgrpo_backends.graphs import Recording

NODES = "nvidia[0-9]*"
LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib/wsl/lib")
DRIVER = ("proc/driver/nvidia/version", "dev/nvidiactl", *(f"{folder}/libcuda.so.1" for folder in LIBRARIES))
ACCESS = "start the container with --gpus all (Kubernetes: a limit on nvidia.com/gpu; Slurm: --gres=gpu:N)"
INSTALL = "a CUDA build of torch (see https://pytorch.org/get-started/locally) and hwgrpo[cuda]"

# No allocator setting: expandable segments would serve ragged batches, but vLLM's sleep mode, which may share this
# process, cannot work with them.
COMMON = {
    "CUDA_DEVICE_ORDER": EnvVar(
        value="PCI_BUS_ID",
        why="on hosts with different GPUs the default order is by speed: ordinals would not be those of nvidia-smi",
        source="NVIDIA, CUDA C++ Programming Guide, CUDA environment variables",
    ),
}
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": EnvVar(
        value=":4096:8",
        why="cuBLAS may choose another workspace, and so another order of sums, each time; torch refuses to multiply "
        "in deterministic mode without it",
        source="NVIDIA, cuBLAS, results reproducibility; torch.use_deterministic_algorithms",
    ),
    "FLASH_ATTENTION_DETERMINISTIC": EnvVar(
        value="1",
        why="the backward pass of flash-attn adds in the order in which blocks finish, if transformers lets it",
        source="transformers: modeling_flash_attention_utils.py",
    ),
}

INTERFACE = {
    "NCCL_SOCKET_IFNAME": EnvVar(
        value="eth0",
        why="several nodes, and a host with several network interfaces: name the one on which the nodes reach each "
        "other, on each node. Which one that is cannot be known from a host",
        source="NVIDIA, NCCL, environment variables; verl 1dda039: docs/start/multinode.rst:310",
    ),
    "GLOO_SOCKET_IFNAME": EnvVar(
        value="eth0",
        why="as NCCL_SOCKET_IFNAME, for the small values that ranks exchange through host memory",
        source="torch: distributed, environment variables of Gloo",
    ),
}
"""Left to the user; RCCL reads the same names."""

OUT_OF_MEMORY = {
    r"CUDA (out of memory|(driver )?error: out of memory)": "the CUDA runtime or driver, outside torch's allocator",
    r"CU(BLAS|BLASLT|DNN|SOLVER)_STATUS_ALLOC_FAILED": "a CUDA library that finds no room for its workspace",
    r"Cuda failure (2 )?'out of memory'": "NCCL, for its buffers",
    r"Triton Error \[CUDA\]: out of memory": "Triton, when it loads a kernel",
}


def probe(facts: Facts) -> Verdict:
    """Judge from the torch build, /dev/nvidia* and, when tier 1 ran, torch's facts. Never from nvidia-smi."""
    claimed = facts.torch_build == "cuda"
    problem = torch_problem(facts)
    if facts.torch_version is not None and not claimed:
        problem = f"torch {facts.torch_version} is not a CUDA build", f"install {INSTALL}"
    built = facts.torch.cuda if facts.torch else None
    verdict = judge(
        facts,
        chip="an NVIDIA GPU",
        nodes=facts.nodes(NODES),
        where=f"/dev/{NODES}",
        variables=("CUDA_VISIBLE_DEVICES",),
        device_type="cuda",
        claimed=claimed,
        problem=problem,
        driver=facts.drivers(DRIVER),
        access=ACCESS,
        broken_fix=(
            f"check that the driver (here {facts.nvidia_driver or 'none found'}) is new enough for CUDA "
            f"{built or 'of this torch build'} and that the container was started with GPU access"
        ),
    )
    device = facts.torch.devices.get("cuda") if facts.torch else None
    if verdict.state == "ok" and device and device.built_for:
        foreign = sorted({arch for arch in device.archs if not runs_on(arch, device.built_for)})
        if foreign:
            return dataclasses.replace(
                verdict,
                state="unusable",
                devices=0,
                reason=f"torch {facts.torch_version} has no kernels for {', '.join(foreign)} ({verdict.reason}); "
                f"it was built for {', '.join(device.built_for)}",
                fix="install a torch build for that GPU, or leave the GPU out with CUDA_VISIBLE_DEVICES",
            )
    return verdict


def runs_on(arch: str, built_for: tuple[str, ...]) -> bool:
    """Return whether a torch built for `built_for` has code for `arch`: same major binary, or PTX to compile.

    A target that ends in "a" is for one chip alone, one that ends in "f" for its family. Source: NVIDIA, CUDA C++
    Programming Guide, compute capabilities.
    """
    major, minor = _version(arch)
    for target in built_for:
        target_major, target_minor = _version(target)
        if target.endswith("a"):
            if (target_major, target_minor) == (major, minor):
                return True
            continue
        if target.endswith("f") and target_major != major:
            continue
        if target.startswith("compute_") and (target_major, target_minor) <= (major, minor):
            return True
        if target_major == major and target_minor <= minor:
            return True
    return False


def _version(arch: str) -> tuple[int, int]:
    digits = re.search(r"\d+", arch)
    assert digits, arch
    return divmod(int(digits[0]), 10)


def arch(index: int) -> str:
    """Return the compute capability of device `index`, as "sm_90"."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def compute_dtypes(index: int) -> tuple[torch.dtype, ...]:
    """Return the dtypes device `index` computes in; bf16 needs sm_80 (torch would emulate it below, slowly)."""
    import torch

    if torch.cuda.get_device_capability(index) >= (8, 0):
        return torch.bfloat16, torch.float16, torch.float32
    return torch.float16, torch.float32


def mark(name: str) -> AbstractContextManager[None]:
    """Name a range for Nsight."""
    from hwgrpo_backends.markers import nvtx

    return nvtx(name)


def record(work: Callable[[], Any]) -> Recording:
    """Record work as a CUDA graph."""
    from hwgrpo_backends.graphs import CudaGraph

    return CudaGraph(work)


BACKEND = Backend(
    name="cuda",
    device_type="cuda",
    visible_env="CUDA_VISIBLE_DEVICES",
    device_nodes=(NODES,),
    driver_files=DRIVER,
    comm="nccl",
    kernels=("triton", "torch"),
    attention=("flash_attention_3", "flash_attention_2", "sdpa", "eager"),
    attention_archs={"flash_attention_3": ("sm_90",)},  # written for Hopper: slower or absent elsewhere
    rollout=("vllm", "vllm_server", "local"),
    env_train=COMMON,
    env_rollout=COMMON,
    env_deterministic=DETERMINISTIC,
    env_optional=INTERFACE,
    torch_build=INSTALL,
    probe=probe,
    arch=arch,
    compute_dtypes=compute_dtypes,
    out_of_memory=OUT_OF_MEMORY,
    chips=NVIDIA,
    mark=mark,
    record=record,
    graphs_by_default=True,
)
