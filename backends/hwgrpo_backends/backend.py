"""What a device family is: data plus three functions. No class hierarchy, nothing here touches a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
    """No backend can be chosen. The message names what was asked for, why it cannot be and what to do."""


@dataclass(frozen=True, kw_only=True)
class EnvVar:
    """One variable of an environment profile. A value that the user set wins over it."""

    value: str
    why: str
    """What goes wrong, or slow, without it."""
    until: str = ""
    """When it can go; empty when no end is in sight."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a backend can run on a host, judged from facts alone."""

    state: State
    """`ok`: torch sees its devices. `unverified`: they are there, nothing has opened them. `unusable`: no."""
    reason: str
    fix: str = ""
    """What the user can do about it; empty when there is nothing to repair."""
    devices: int = 0
    """How many devices this process could use."""
    claimed: bool = False
    """The installed stack was built for this backend, so finding it unusable beside its hardware is a fault."""
    hardware: Hardware = "none"
    """`present`: nodes are there, or a driver that the stack was built for. `hidden`: a variable hides all of them."""

    @property
    def usable(self) -> bool:
        return self.state != "unusable"


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One device family. A third party offers one through the entry-point group `hwgrpo.backends`."""

    name: str
    """What users type: "rocm" is not "cuda"."""
    device_type: str
    """torch's word for it; ROCm builds answer "cuda"."""
    plugin: str | None = None
    """The module that must import before torch knows the device."""
    visible_env: str | None = None
    """The variable that restricts a process to some of the devices."""
    conflicts: tuple[str, ...] = ()
    """Variables that must not be set beside `visible_env`: reported, never merged."""
    device_nodes: tuple[str, ...] = ()
    """Patterns of names under /dev by which the hardware shows itself."""
    companion_nodes: tuple[str, ...] = ()
    """Patterns of further names under /dev, such as "dri/renderD*": no hardware by themselves, but needed to use it."""
    driver_files: tuple[str, ...] = ()
    """Patterns of paths below / by which a driver shows itself where the nodes were left outside of a container."""
    packages: tuple[str, ...] = ()
    """Distributions, beside torch, whose versions matter to `probe`."""
    comm: str
    """The torch.distributed backend of its collectives."""
    kernels: tuple[str, ...]
    """Kernel implementations in order of preference; the last one is "torch"."""
    attention: tuple[str, ...]
    """Attention implementations (transformers' names) in order of preference."""
    attention_archs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of those that are for some chips only: which `arch` they are for."""
    modules: tuple[str, ...] = ()
    """Fused modules, in hwgrpo_kernels' words, that take the place of a model's own where they compute the same."""
    rollout: tuple[str, ...]
    """Rollout engines in order of preference."""
    env_train: Mapping[str, EnvVar] = field(default_factory=dict)
    env_rollout: Mapping[str, EnvVar] = field(default_factory=dict)
    env_deterministic: Mapping[str, EnvVar] = field(default_factory=dict)
    """What training needs beside `env_train` so that a run repeats its numbers."""
    torch_build: str
    """Which build of torch, and what beside it, to install."""
    probe: Callable[[Facts], Verdict]
    """Pure: facts in, verdict out."""
    arch: Callable[[int], str]
    """Device index -> chip architecture ("sm_90", "gfx942", "ascend910b1"); opens the device."""
    compute_dtypes: Callable[[int], tuple[torch.dtype, ...]]
    """Device index -> dtypes with real compute support, the default one first; opens the device."""
    out_of_memory: Mapping[str, str] = field(default_factory=dict)
    """Pattern of a RuntimeError's text that means this family's memory is full -> who raises it. Errors that have
    torch's own type for it need none."""
    chips: tuple[Chip, ...] = ()
    """What its chips do at most (`hwgrpo_backends.peaks`); none where a share of it would mean nothing."""
    mark: Callable[[str], AbstractContextManager[None]] | None = None
    """Names a range of the run for the vendor's profiler; None where there is none beside torch's."""
    record: Recorder | None = None
    """Records work as a device graph (`hwgrpo_backends.graphs`); None where that is not offered."""

    @property
    def is_host(self) -> bool:
        """True when the device is the host processor itself, so that there is no accelerator to manage."""
        return self.device_type == "cpu"

    def environment(self, purpose: Purpose, deterministic: bool = False) -> Mapping[str, EnvVar]:
        """Return the variables for the training process or for the process of a rollout engine.

        Args:
            purpose: which of the two.
            deterministic: whether training is to repeat its numbers; changes nothing for a rollout engine.
        """
        assert purpose in ("train", "rollout"), purpose
        if purpose == "rollout":
            return self.env_rollout
        return {**self.env_train, **self.env_deterministic} if deterministic else self.env_train
