"""`Backend`: a device family as data plus three functions. Nothing here touches a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from hwgrpo_backends.facts import Facts
    from hwgrpo_backends.graphs import Recorder
    from hwgrpo_backends.peaks import Chip

State = Literal["ok", "unverified", "unusable"]
Hardware = Literal["none", "hidden", "present"]
Purpose = Literal["train", "rollout"]


class BackendError(ValueError):
    """No backend can be selected. The message has the request, the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
class EnvVar:
    """One variable of an environment profile. A value set by the user takes precedence."""

    value: str
    why: str
    """The failure or slowdown without it."""
    until: str = ""
    """When it can be removed; empty: unknown."""
    source: str = ""
    """Documents, or files and lines of named versions, that the value and its reason come from."""
    files: tuple[str, ...] = ()
    """Files of which the first that exists is the value; without one the variable is not set."""

    def on_host(self) -> EnvVar | None:
        """Return the variable with its value on this host; None where none of its files exists."""
        if not self.files:
            return self
        found = next((file for file in self.files if Path(file).is_file()), None)
        return None if found is None else replace(self, value=found)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a backend can run on a host, judged from facts alone."""

    state: State
    """`ok`: torch sees its devices. `unverified`: they exist, but none was opened. `unusable`: otherwise."""
    reason: str
    fix: str = ""
    """Remedy for the user; empty if there is nothing to repair."""
    devices: int = 0
    """Devices that this process can use."""
    claimed: bool = False
    """The installed stack was built for this backend, so it is an error if its present hardware is unusable."""
    hardware: Hardware = "none"
    """`present`: device nodes or a matching driver exist. `hidden`: a variable hides all devices."""
    signs: tuple[str, ...] = ()
    """Paths that show a device, e.g. /dev/nvidia0; empty where there is none."""

    @property
    def usable(self) -> bool:
        return self.state != "unusable"


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One device family. Third parties register one in the entry-point group `hwgrpo.backends`."""

    name: str
    """Name in settings: "rocm" is not "cuda"."""
    device_type: str
    """torch device type; "cuda" in ROCm builds."""
    plugin: str | None = None
    """The module that must import before torch knows the device."""
    visible_env: str | None = None
    """The variable that restricts a process to some of the devices."""
    filters: tuple[str, ...] = ()
    """Variables that restrict it before `visible_env` does, in this order: each numbers from 0 what it leaves."""
    conflicts: tuple[str, ...] = ()
    """Other names of `visible_env`, read where it is not set: set beside it, to something else, they are reported."""
    device_nodes: tuple[str, ...] = ()
    """Patterns of device nodes under /dev."""
    companion_nodes: tuple[str, ...] = ()
    """Patterns of further names under /dev, such as "dri/renderD*": no hardware by themselves, but needed to use it."""
    driver_files: tuple[str, ...] = ()
    """Patterns of paths below / that show a driver even if a container lacks the nodes."""
    wsl_files: tuple[str, ...] = ()
    """Patterns of paths below / of the library by which the devices are reached through WSL's /dev/dxg."""
    packages: tuple[str, ...] = ()
    """Distributions besides torch whose versions `probe` reads."""
    comm: str
    """The torch.distributed backend of its collectives."""
    kernels: tuple[str, ...]
    """Kernel implementations in order of preference; the last one is "torch"."""
    attention: tuple[str, ...]
    """Attention implementations (transformers' names) in order of preference."""
    attention_archs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Attention implementation -> the only `arch`s it supports."""
    modules: tuple[str, ...] = ()
    """Fused modules, by hwgrpo_kernels' names, that replace a model's own by default where they compute the same."""
    rollout: tuple[str, ...]
    """Rollout engines in order of preference."""
    env_train: Mapping[str, EnvVar] = field(default_factory=dict)
    env_rollout: Mapping[str, EnvVar] = field(default_factory=dict)
    env_deterministic: Mapping[str, EnvVar] = field(default_factory=dict)
    """Further variables of deterministic training."""
    env_optional: Mapping[str, EnvVar] = field(default_factory=dict)
    """Variables left to the user: `value` is one that others use, `why` says when to set it and why it is not set."""
    no_sleep_with_experts: str = ""
    """Why vLLM's sleep mode breaks mixtures of experts on these devices; empty: it does not."""
    no_images_in_vllm: str = ""
    """Why vLLM takes no prompts with images on these devices; empty: it does."""
    torch_build: str
    """The build of torch and further packages to install."""
    probe: Callable[[Facts], Verdict]
    """Pure: facts in, verdict out."""
    arch: Callable[[int], str]
    """Device index -> chip architecture ("sm_90", "gfx942", "ascend910b1"); opens the device."""
    compute_dtypes: Callable[[int], tuple[torch.dtype, ...]]
    """Device index -> dtypes with native compute support, the default first; opens the device."""
    out_of_memory: Mapping[str, str] = field(default_factory=dict)
    """Pattern of a RuntimeError's text that means this family's memory is full -> who raises it. Errors that have
    torch's own type for it need none."""
    chips: tuple[Chip, ...] = ()
    """Peak rates of its chips (`hwgrpo_backends.peaks`); empty if utilization would be meaningless."""
    mark: Callable[[str], AbstractContextManager[None]] | None = None
    """Names a range for the vendor's profiler; None: only torch's profiler."""
    record: Recorder | None = None
    """Records work as a device graph (`hwgrpo_backends.graphs`); None: unsupported."""
    prepare: Callable[[], None] | None = None
    """Sets what torch reads from a variable once, perhaps before this process had it; called before the first use."""
    sdpa_kernels: Callable[[], tuple[str, ...]] | None = None
    """Kernels among which torch's scaled_dot_product_attention chooses, by torch's names; None: it has one."""
    graphs_by_default: bool = False
    """Rollout records its decode steps unless set otherwise (`rollout.graphs`). Only where this was run on hardware."""

    @property
    def is_host(self) -> bool:
        """Whether the device is the host processor, without an accelerator."""
        return self.device_type == "cpu"

    def computes_on(self, device_type: str, *, hip: bool) -> bool:
        """Return whether a library that computes on torch's `device_type`, with HIP or without, serves this family."""
        return device_type == self.device_type and hip == {"cuda": False, "rocm": True}.get(self.name, hip)

    def environment(self, purpose: Purpose, deterministic: bool = False) -> Mapping[str, EnvVar]:
        """Return the environment variables of the training process or of a rollout engine on this host.

        Args:
            purpose: "train" or "rollout".
            deterministic: add the variables of deterministic training; ignored for rollout.
        """
        assert purpose in ("train", "rollout"), purpose
        variables = self.env_rollout if purpose == "rollout" else self.env_train
        if deterministic and purpose == "train":
            variables = {**variables, **self.env_deterministic}
        here = {name: variable.on_host() for name, variable in variables.items()}
        return {name: variable for name, variable in here.items() if variable is not None}
