"""Device families: which one this host has, and why. Importing it imports no torch.

backend.py            `Backend`: a device family as data plus three functions; `EnvVar`, `Verdict`, `BackendError`
cpu.py, cuda.py, rocm.py, npu.py   the built-in families
registry.py           the known backends, including those of other distributions
facts.py              facts about a host
tier0.py              facts without torch
tier1.py              facts of a child process that imports torch, which runs torch_probe.py
child.py              child processes with JSON output, in which torch is imported
distributions.py      installed distributions
entry_points.py       entry points of distributions, damaged ones skipped
surroundings.py       the container, WSL or scheduler job of this process
visibility.py         variables that choose devices: what they leave, and what to do about it
unserved.py           accelerators without a backend
torch_build.py        for which hardware a build of torch is
probing.py            helpers shared by the probes of accelerator families
decide.py             `decide(facts, requested)`: the selection as a pure function
selection.py          `choose(requested)`: gather facts, decide, or raise
finding.py            one line of a diagnosis
vendor_findings.py    checks of each family in a diagnosis
peaks.py              peak FLOP/s and bandwidth of chips, with sources
nvidia_driver.py      the version of NVIDIA's driver, and the minimum of a CUDA build of torch
environment.py        environment variables of a backend for training and rollout
device.py             `Device`: the runtime calls of a trainer (imports torch)
graphs.py             device graphs (imports torch)
markers.py            ranges for vendors' profilers (imports torch)
testing.py            `check_backend`: the conformance suite for a new backend
conformance_names.py, conformance_device.py, conformance_processes.py, conformance_rank.py   its parts
"""

from hwgrpo_backends.backend import Backend, BackendError, EnvVar, Verdict
from hwgrpo_backends.decide import Decision
from hwgrpo_backends.facts import Facts, TorchDevice, TorchFacts
from hwgrpo_backends.registry import get, load_all, names
from hwgrpo_backends.selection import Choice, choose
from hwgrpo_backends.tier0 import gather_tier0
from hwgrpo_backends.tier1 import gather_tier1

__all__ = [
    "Backend",
    "BackendError",
    "Choice",
    "Decision",
    "EnvVar",
    "Facts",
    "TorchDevice",
    "TorchFacts",
    "Verdict",
    "choose",
    "gather_tier0",
    "gather_tier1",
    "get",
    "load_all",
    "names",
]
