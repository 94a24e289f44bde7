"""Huawei Ascend NPUs through torch-npu, a plug-in of torch's CPU builds."""

from __future__ import annotations

import platform
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

# Sources: commits of verl-project/verl (2026-08-22), vllm-project/vllm-ascend (2026-08-22) and Ascend/pytorch.
_TORCH_NPU = "Ascend/pytorch bc7fb13: docs/en"
_VERL = "verl 1dda039: examples"
_TUNING = "vllm-ascend 182b75e: docs/source/developer_guide/performance_and_debug/optimization_and_tuning.md"
MACHINE = platform.machine()

_PRELOAD = EnvVar(
    value="libjemalloc.so.2",
    files=(
        f"/usr/lib/{MACHINE}-linux-gnu/libjemalloc.so.2",
        "/usr/lib64/libjemalloc.so.2",
        "/usr/local/lib/libjemalloc.so.2",
    ),
    why="jemalloc has a cache per thread, where the threads that submit operators contend for glibc's locks. Set "
    "where the library is installed, for processes started from then on",
    source=f"{_TUNING}; {_VERL}/grpo_trainer/run_qwen3_4b_fsdp.sh:48",
)
_CONNECT = EnvVar(
    value="1800",
    why="ranks reach the first collective minutes after each other: they load a model; CANN's default is 120 s",
    source=f"{_VERL}/grpo_trainer/run_qwen3_8b_fsdp.sh:96 has 1500, other scripts up to 7200",
)
_PORTS = "CANN 8.5.0: envref_07_0143; verl 1dda039: verl/trainer/constants_ppo.py:96"
_HOST_PORTS = EnvVar(
    value="auto",
    why="a trainer and a rollout server on one NPU would both bind HCCL's default host ports, 60000 to 60015. "
    "Behind a firewall set a range, e.g. 60000-60050; HCCL_IF_BASE_PORT has no effect beside it",
    source=_PORTS,
)
_NPU_PORTS = EnvVar(
    value="auto",
    why="a trainer and a rollout server on one NPU would both bind HCCL's default device port, 16666. Behind a "
    "firewall set a range, e.g. 61000-61050",
    source=_PORTS,
)
TRAIN = {
    "TASK_QUEUE_ENABLE": EnvVar(
        value="2",
        why="the host submits operators from a second thread; costs workspace memory, 1 where it is tight",
        source=f"{_TORCH_NPU}/api/environment_variable/TASK_QUEUE_ENABLE.md; "
        f"{_VERL}/grpo_trainer/run_qwen3_4b_fsdp.sh:46",
    ),
    "PYTORCH_NPU_ALLOC_CONF": EnvVar(
        value="expandable_segments:True",
        why="micro-batches of changing length fragment fixed segments",
        source=f"{_TORCH_NPU}/developer_notes/framework_feature_guide_pytorch/virtual_memory.md",
    ),
    "CPU_AFFINITY_CONF": EnvVar(
        value="1",
        why="binds the host threads to the cores next to their NPU. In a container that has some of the cores it "
        "is skipped with a warning: 1,force:1",
        source=f"{_TORCH_NPU}/api/environment_variable/CPU_AFFINITY_CONF.md; "
        f"{_VERL}/grpo_trainer/run_qwen3_4b_fsdp.sh:47",
    ),
    "HCCL_CONNECT_TIMEOUT": _CONNECT,
    "HCCL_EXEC_TIMEOUT": EnvVar(
        value="3600",
        why="a collective waits for the slowest rollout or checkpoint; CANN's default is about 30 minutes. Keep it "
        "below trainer.process_group_timeout, or the logs lack HCCL's cause of a timeout",
        source="Ascend/pytorch 0e02263: docs/en/environment_variable_reference/HCCL_ASYNC_ERROR_HANDLING.md; "
        f"{_VERL}/gspo_trainer/run_qwen3_8b_fsdp.sh:62",
    ),
    "HCCL_HOST_SOCKET_PORT_RANGE": _HOST_PORTS,
    "HCCL_NPU_SOCKET_PORT_RANGE": _NPU_PORTS,
    "LD_PRELOAD": _PRELOAD,
}
# No PYTORCH_NPU_ALLOC_CONF: vllm-ascend sets expandable segments itself, unless its sleep mode is on, which refuses
# them; to an empty value it would append ",expandable_segments:True" (vllm_ascend/platform.py:788). No
# CPU_AFFINITY_CONF: it binds its workers itself.
ROLLOUT = {
    "TASK_QUEUE_ENABLE": EnvVar(
        value="1",
        why="torch-npu refuses level 2 while vllm-ascend captures its graphs (ACL graph)",
        source="torch-npu 2.10.0.post4: libtorch_npu.so, an error of NPUGraph; vllm-ascend 182b75e: Dockerfile:74; "
        "verl 1dda039: docs/ascend_tutorial/dev_guide/performance/perf_tuning_on_ascend.rst",
    ),
    "VLLM_ASCEND_ENABLE_NZ": EnvVar(
        value="0",
        why="weights in the NZ format cannot be updated: vllm-ascend refuses to start a weight update",
        until="vllm-ascend after 0.23 with additional_config rl_config.enabled",
        source="vllm-ascend 0.23.0: vllm_ascend/worker/worker.py:295",
    ),
    "HCCL_CONNECT_TIMEOUT": _CONNECT,
    "HCCL_HOST_SOCKET_PORT_RANGE": _HOST_PORTS,
    "HCCL_NPU_SOCKET_PORT_RANGE": _NPU_PORTS,
    "LD_PRELOAD": _PRELOAD,
}
# torch-npu takes torch.use_deterministic_algorithms for its operators. Left out: LCCL_DETERMINISTIC and what ATB reads,
# for libraries that are no part of this stack.
DETERMINISTIC = {
    "HCCL_DETERMINISTIC": EnvVar(
        value="true",
        why="reductions of HCCL (all-reduce, reduce-scatter) otherwise add in the order of arrival",
        source="verl 1dda039: docs/ascend_tutorial/dev_guide/precision_analysis/precision_alignment_zh.md:64",
    ),
}
OPTIONAL = {
    "HCCL_SOCKET_IFNAME": EnvVar(
        value="eth0",
        why="several nodes, and a host with several network interfaces: name the one on which the nodes reach each "
        "other, on each node. Which one that is cannot be known from a host",
        source="verl 1dda039: docs/ascend_tutorial/model_support/examples/ascend_vllm_best_practices.rst:131",
    ),
    "GLOO_SOCKET_IFNAME": EnvVar(
        value="eth0",
        why="as HCCL_SOCKET_IFNAME, for the small values that ranks exchange through host memory",
        source="verl 1dda039: docs/ascend_tutorial/model_support/examples/ascend_vllm_best_practices.rst:182",
    ),
    "HCCL_OP_EXPANSION_MODE": EnvVar(
        value="AIV",
        why="faster small collectives of a rollout server by tensor parallelism; set it in rollout.server.env and "
        "compare. On Atlas A2 CANN supports it for inference only, and not for several communicators at once, "
        "which trainers have; HCCL_DETERMINISTIC turns it off",
        source=f"CANN 8.5.0: envref_07_0096; verl 1dda039: .github/workflows/nightly_ascend.yml:195; {_TUNING}",
    ),
    "HCCL_BUFFSIZE": EnvVar(
        value="200",
        why="MB of a communicator's buffer; each communicator has two, outside torch's memory. Lower it where "
        "memory is tight; raise it (verl: 300 to 610) for a server with expert parallelism. Unset it is 200",
        source=f"CANN 8.5.0: hcclug_000076; {_VERL}/grpo_trainer/run_qwen3_30b_veomni.sh:28",
    ),
    "TORCH_HCCL_ASYNC_ERROR_HANDLING": EnvVar(
        value="0",
        why="leave it: 0, as some scripts of verl have, ends torch-npu's watchdog, and ranks then wait for one "
        "that is gone. HCCL_ASYNC_ERROR_HANDLING is its name up to torch-npu 2.10.0.post4",
        source=f"{_TORCH_NPU}/developer_notes/framework_feature_guide_pytorch/watchdog.md; "
        f"{_VERL}/gspo_trainer/run_qwen3_8b_fsdp.sh:64",
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
        BACKEND,
        chip="an Ascend NPU",
        nodes=facts.nodes(NODES),
        where=f"/dev/{NODES}",
        claimed="torch-npu" in facts.distributions,
        problem=_problem(facts),
        driver=facts.drivers(DRIVER),
        access=ACCESS,
        broken_fix=lambda _: (
            "check npu-smi info, source the set_env.sh of CANN, and see that driver, CANN and torch-npu match"
        ),
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
    env_optional=OPTIONAL,
    # worker.py:251 (0.23.0); the weights that follow are loaded as if they were not transposed
    no_sleep_with_experts="vllm-ascend 0.23 transposes the weights of experts when it wakes up",
    no_images_in_vllm="vllm-ascend 0.23 is of vLLM 0.23, and prompts with images need vLLM 0.32",
    torch_build=INSTALL,
    probe=probe,
    arch=arch,
    compute_dtypes=compute_dtypes,
    out_of_memory=OUT_OF_MEMORY,
    chips=ASCEND,
    mark=mark,
)
