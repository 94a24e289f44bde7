"""NVIDIA GPUs through torch's CUDA builds."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING, Any

from hwgrpo_backends import nvidia_driver
from hwgrpo_backends.backend import Backend, EnvVar, Verdict
from hwgrpo_backends.peaks import NVIDIA
from hwgrpo_backends.probing import CONTAINER_ACCESS, judge, leave_out, torch_problem

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from hwgrpo_backends.facts import Facts, TorchDevice
    from hwgrpo_backends.graphs import Recording

NODES = "nvidia[0-9]*"
TEGRA_NODES = ("nvhost-gpu", "nvgpu/igpu[0-9]*")
"""Nodes of the GPU in a Jetson's chip; from JetPack 6 on it has /dev/nvidia0, too."""
UVM = "dev/nvidia-uvm"
LIBRARIES = tuple(
    f"{folder}/libcuda.so.1"
    for folder in ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib/wsl/lib")
)
DRIVER = (nvidia_driver.FILE, "dev/nvidiactl", UVM, *LIBRARIES)
ACCESS = "start the container with --gpus all (Kubernetes: a limit on nvidia.com/gpu; Slurm: --gres=gpu:N)"
WINDOWS_FIX = (
    "update the NVIDIA driver of Windows and run `wsl --update`; install no driver inside WSL, and start a container "
    "there with --gpus all"
)
JETSON_INSTALL = (
    "install NVIDIA's build of torch for this JetPack: those of PyPI and PyTorch have no kernels for a Jetson before "
    "JetPack 7"
)
INSTALL = "a CUDA build of torch (see https://pytorch.org/get-started/locally) and hwgrpo[cuda]"

CUDNN_LAST = "TORCH_CUDNN_SDPA_DEPRIORITIZED"

# No allocator setting: expandable segments would serve ragged batches, but vLLM's sleep mode, which may share this
# process, cannot work with them.
COMMON = {
    "CUDA_DEVICE_ORDER": EnvVar(
        value="PCI_BUS_ID",
        why="on hosts with different GPUs the default order is by speed: ordinals would not be those of nvidia-smi",
        source="NVIDIA, CUDA C++ Programming Guide, CUDA environment variables",
    ),
    CUDNN_LAST: EnvVar(
        value="1",
        why="on Hopper and Blackwell torch 2.11 and newer prefers cuDNN's attention, which makes a plan, published as "
        "half a second, for each new shape: ragged batches bring one in nearly every micro-batch",
        source="torch: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; FunASR issue 3704 (0.44 s forward, 0.55 s "
        "backward, on a B200)",
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

BY_ERROR = {
    r"Error 802\b|system not yet initialized": "start NVIDIA's fabric manager, which GPUs behind NVSwitch wait for, in "
    "the driver's version: systemctl start nvidia-fabricmanager (of a virtual machine: on its host)",
    r"Error 803\b|unsupported display driver": "match libcuda and the kernel's driver: restart after an update of the "
    "driver, and take other versions of libcuda (cuda-compat) off LD_LIBRARY_PATH",
    r"Error 804\b|forward compatibility was attempted": "take cuda-compat, which does not serve this GPU, off "
    "LD_LIBRARY_PATH",
    r"Error 34\b|stub library": "take the folder `stubs` off LD_LIBRARY_PATH",
    r"Error 46\b|busy or unavailable": "see which process has the GPU (nvidia-smi), and whether its compute mode is "
    "exclusive",
    r"Error 999\b|unknown error": "load the module for managed memory anew: modprobe -r nvidia_uvm, then modprobe "
    "nvidia_uvm",
}
"""Pattern of what torch says when it cannot use a GPU -> what to do; none of them is of the driver's age."""

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
        install = JETSON_INSTALL if facts.tegra else f"install {INSTALL}"
        problem = f"torch {facts.torch_version} is not a CUDA build", install
    nodes, where = facts.nodes(NODES), f"/dev/{NODES}"
    if not nodes and (nodes := facts.nodes(*TEGRA_NODES)[:1]):
        where = f"/dev/{nodes[0]}"
    verdict = judge(
        facts,
        BACKEND,
        chip="an NVIDIA GPU",
        nodes=nodes,
        where=where,
        claimed=claimed,
        problem=problem,
        driver=facts.drivers(DRIVER),
        access=ACCESS,
        windows_fix=WINDOWS_FIX,
        broken_fix=lambda device: _broken_fix(facts, device),
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
                fix=leave_out("CUDA_VISIBLE_DEVICES", foreign, device.archs),
            )
    return verdict


def _broken_fix(facts: Facts, device: TorchDevice) -> str:
    """Return what to do where torch cannot use a GPU that is there: what is known to be right is not spoken of."""
    driver, toolkit = facts.nvidia_driver, facts.torch_toolkit or (facts.torch.cuda if facts.torch else None)
    for pattern, fix in BY_ERROR.items():
        if re.search(pattern, device.problem or ""):
            return fix
    if facts.tegra:
        return JETSON_INSTALL
    too_old = nvidia_driver.is_too_old(driver, toolkit)
    if too_old:
        return (
            f"update the driver (here {driver}; CUDA {toolkit} needs {nvidia_driver.needed(toolkit)} or newer), or "
            "install a torch build for an older CUDA"
        )
    checks = []
    if too_old is None:
        known = driver or "none found"
        checks.append(f"check that the driver (here {known}) is new enough for CUDA {toolkit or 'of this torch build'}")
    if not facts.drivers((UVM,)):
        checks.append("make /dev/nvidia-uvm, which is missing: modprobe nvidia_uvm && nvidia-modprobe -u -c 0")
    if facts.mig_instances == 0:
        checks.append(
            "if MIG is on (nvidia-smi), make instances, of which there are none: nvidia-smi mig -cgi PROFILE -C, or "
            "turn it off: nvidia-smi -mig 0"
        )
    if facts.container in CONTAINER_ACCESS:
        checks.append(CONTAINER_ACCESS[facts.container])
    else:
        checks.append(
            f"see that the container has the GPU: {ACCESS}"
            if facts.container
            else "look at nvidia-smi and `dmesg | grep NVRM`; in a container, see that it was started with GPU access"
        )
    return "; ".join(checks)


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


def prepare() -> None:
    """Turn cuDNN's attention off where `CUDNN_LAST` says so: torch may have read the variable before it was set."""
    import torch

    if os.environ.get(CUDNN_LAST) == "1":
        torch.backends.cuda.enable_cudnn_sdp(False)


def sdpa_kernels() -> tuple[str, ...]:
    """Return the kernels that torch may choose; "cudnn" comes first on Hopper and Blackwell (torch 2.11 and newer)."""
    import torch

    flags = torch.backends.cuda
    enabled = {
        "flash": flags.flash_sdp_enabled(),
        "mem_efficient": flags.mem_efficient_sdp_enabled(),
        "math": flags.math_sdp_enabled(),
        "cudnn": flags.cudnn_sdp_enabled(),
    }
    return tuple(name for name, on in enabled.items() if on)


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
    device_nodes=(NODES, *TEGRA_NODES),
    driver_files=DRIVER,
    wsl_files=LIBRARIES,
    comm="nccl",
    kernels=("triton", "torch"),
    attention=("flash_attention_3", "flash_attention_2", "sdpa", "eager"),
    attention_archs={"flash_attention_3": ("sm_90",)},  # written for Hopper: slower or absent elsewhere
    modules=("rms_norm", "rotary", "swiglu"),
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
    prepare=prepare,
    sdpa_kernels=sdpa_kernels,
    graphs_by_default=True,
)
