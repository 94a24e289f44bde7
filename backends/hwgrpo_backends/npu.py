"""Huawei Ascend NPUs through torch-npu, a plug-in of torch's CPU builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwgrpo_backends.backend import Backend, EnvVar, Verdict
from hwgrpo_backends.peaks import ASCEND
from hwgrpo_backends.probing import Problem, judge, torch_problem

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from hwgrpo_backends.facts import Facts

NODES = "davinci[0-9]*"  # not davinci_manager, which is there without a card
DRIVER = ("dev/davinci_manager", "usr/local/Ascend/driver/version.info")
ACCESS = (
    "start the container with --device=/dev/davinci0 (one per NPU), --device=/dev/davinci_manager, "
    "--device=/dev/devmm_svm, --device=/dev/hisi_hdc and -v /usr/local/Ascend/driver:/usr/local/Ascend/driver "
    "(Kubernetes: a limit on huawei.com/Ascend910)"
)
INSTALL = "the CPU build of torch with torch-npu of the same version (hwgrpo[npu]), and CANN"

TRAIN = {
    "TASK_QUEUE_ENABLE": EnvVar(
        value="2", why="the host submits operators from a second thread; costs workspace memory, 1 where it is tight"
    ),
    "PYTORCH_NPU_ALLOC_CONF": EnvVar(
        value="expandable_segments:True", why="micro-batches of changing length fragment fixed segments"
    ),
    "CPU_AFFINITY_CONF": EnvVar(value="1", why="binds the host threads to the cores next to their NPU"),
    "HCCL_CONNECT_TIMEOUT": EnvVar(
        value="1800",
        why="ranks reach the first collective minutes after each other: they load a model; default 120 s",
    ),
    "HCCL_EXEC_TIMEOUT": EnvVar(
        value="3600", why="a collective waits for the slowest rollout or checkpoint; the default is about 30 minutes"
    ),
}
ROLLOUT = {
    "TASK_QUEUE_ENABLE": EnvVar(value="1", why="level 2 cannot run in the graph mode of vllm-ascend"),
    "VLLM_ASCEND_ENABLE_NZ": EnvVar(
        value="0", why="weights in the NZ format cannot be updated: vllm-ascend refuses to start a weight update"
    ),
    "PYTORCH_NPU_ALLOC_CONF": EnvVar(value="", why="sleep mode's memory pool refuses expandable segments"),
    "HCCL_CONNECT_TIMEOUT": TRAIN["HCCL_CONNECT_TIMEOUT"],
    "HCCL_HOST_SOCKET_PORT_RANGE": EnvVar(
        value="auto", why="the engine and the trainer share an NPU and would both bind HCCL's default host port"
    ),
    "HCCL_NPU_SOCKET_PORT_RANGE": EnvVar(
        value="auto", why="the engine and the trainer share an NPU and would both bind HCCL's default device port"
    ),
}
# torch-npu takes torch.use_deterministic_algorithms for its operators. Left out: LCCL_DETERMINISTIC and what ATB reads,
# for libraries that are no part of this stack.
DETERMINISTIC = {
    "HCCL_DETERMINISTIC": EnvVar(
        value="true", why="reductions of HCCL (all-reduce, reduce-scatter) otherwise add in the order of arrival"
    ),
}

# Codes and their meaning: CANN's acl_base.h and rt_error_codes.h; EL0004 is in its list of driver errors.
OUT_OF_MEMORY = {
    r"NPU out of memory": "torch-npu's allocator; a plain RuntimeError in older versions",
    r"error code(?: is|:) *(200000|207001|207018)\b": (
        "ACL: ACL_ERROR_BAD_ALLOC, ACL_ERROR_RT_MEMORY_ALLOCATION, ACL_ERROR_RT_DEVICE_OOM"
    ),
    r"\bEL0004\b": "the driver: memory could not be allocated (HCCL's buffers, operators' workspace)",
}


def probe(facts: Facts) -> Verdict:
    """Judge from torch-npu, the torch build, /dev/davinci* and, when tier 1 ran, torch's facts."""
    return judge(
        facts,
        chip="an Ascend NPU",
        nodes=facts.nodes(NODES),
        where=f"/dev/{NODES}",
        variables=("ASCEND_RT_VISIBLE_DEVICES",),
        device_type="npu",
        claimed="torch-npu" in facts.distributions,
        problem=_problem(facts),
        driver=facts.drivers(DRIVER),
        access=ACCESS,
        broken_fix="check npu-smi info, source the set_env.sh of CANN, and see that driver, CANN and torch-npu match",
    )


def _problem(facts: Facts) -> Problem | None:
    """Return problems of the installed stack, causes before their consequences."""
    plugin = facts.distributions.get("torch-npu")
    if facts.torch_version is None:
        return torch_problem(facts)
    if plugin is None:
        return "torch-npu is not installed", f"install {INSTALL}"
    if facts.torch_build in ("cuda", "rocm"):
        return (
            f"torch-npu refuses torch {facts.torch_version}, which is built for {facts.torch_build}",
            "install the CPU build of torch (its +cpu wheel), or pip uninstall torch-npu where no NPU is to be used",
        )
    if _minor(plugin) != _minor(facts.torch_version):
        fix = f"install torch {_minor(plugin)}.* (CPU build), or torch-npu {_minor(facts.torch_version)}.*"
        return f"torch-npu {plugin} does not fit torch {facts.torch_version}", fix
    return torch_problem(facts)


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def arch(index: int) -> str:
    """Return the chip of device `index` in lower case, as "ascend910b1"; numbers of cores differ within a family."""
    import torch

    return torch.get_device_module("npu").get_device_name(index).lower().replace(" ", "_")


def compute_dtypes(index: int) -> tuple[torch.dtype, ...]:
    """Return the dtypes device `index` computes in; 910A and 310P have no bf16 (all NPUs of a host are alike)."""
    import torch

    if torch.get_device_module("npu").is_bf16_supported():
        return torch.bfloat16, torch.float16, torch.float32
    return torch.float16, torch.float32


def mark(name: str) -> AbstractContextManager[None]:
    """Name a range for msprof."""
    from hwgrpo_backends.markers import mstx

    return mstx(name)


BACKEND = Backend(
    name="npu",
    device_type="npu",
    plugin="torch_npu",
    visible_env="ASCEND_RT_VISIBLE_DEVICES",
    device_nodes=(NODES,),
    driver_files=DRIVER,
    packages=("torch-npu", "triton-ascend", "vllm-ascend"),
    comm="hccl",
    kernels=("triton", "torch"),
    # flash_attention_2 is transformers' own way to the same operator; FlashAttention itself has no NPU build
    attention=("npu_fusion_attention", "flash_attention_2", "sdpa", "eager"),
    modules=("rms_norm", "rotary", "swiglu"),
    # vllm-ascend pins another torch than the trainer's: it always runs in its own environment and process.
    rollout=("vllm_server", "local"),
    env_train=TRAIN,
    env_rollout=ROLLOUT,
    env_deterministic=DETERMINISTIC,
    torch_build=INSTALL,
    probe=probe,
    arch=arch,
    compute_dtypes=compute_dtypes,
    out_of_memory=OUT_OF_MEMORY,
    chips=ASCEND,
    mark=mark,
)
