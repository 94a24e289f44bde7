"""What a device family is, which one this host has, and why. Importing it imports no torch.

backend.py            `Backend`: a device family as data plus three functions; `EnvVar`, `Verdict`, `BackendError`
cpu.py, cuda.py, rocm.py, npu.py   the built-in families
registry.py           the known backends, those of other distributions included
facts.py              what is known of a host, as values
tier0.py              facts without torch
tier1.py              facts of a child process that imports torch, which runs torch_probe.py
child.py              processes that answer in lines of JSON: what imports torch does so there
distributions.py      what is installed
entry_points.py       what distributions offer, and which of it cannot be read
surroundings.py       the container, WSL or scheduler's job a process runs inside of
probing.py            what the probes of accelerator families share
decide.py             `decide(facts, requested)`: the choice, a pure function
selection.py          `choose(requested)`: gather, decide, or refuse
finding.py            one line of a diagnosis
vendor_findings.py    what each family is checked for in a diagnosis
peaks.py              FLOP/s and bandwidth that chips reach at most, with sources
nvidia_driver.py      which driver a CUDA build of torch needs
environment.py        the variables a backend wants for training and for rollout
device.py             `Device`: the runtime calls of a trainer (imports torch)
graphs.py             device graphs (imports torch)
markers.py            ranges for vendors' profilers (imports torch)
testing.py            `check_backend`: what a new backend must satisfy
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
