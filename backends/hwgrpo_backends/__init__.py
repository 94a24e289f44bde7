"""What a device family is, which one this host has, and why. Importing it imports no torch.

| module | holds |
|---|---|
| `backend` | `Backend`: a device family as data plus three functions; `EnvVar`, `Verdict`, `BackendError` |
| `cpu`, `cuda`, `rocm`, `npu` | the built-in families, one file each |
| `registry` | the known backends, those of other distributions included |
| `facts`, `tier1` | what is known of a host: without torch, and from a child process that imports torch |
| `child` | processes that answer in lines of JSON: what imports torch does so there |
| `distributions`, `entry_points` | what is installed, what it offers, and which of it cannot be read |
| `surroundings` | the container, WSL or scheduler's job a process runs inside of |
| `decide` | `decide(facts, requested)`: the choice, a pure function |
| `selection` | `choose(requested)`: gather, decide, or refuse |
| `finding`, `vendor_findings` | what each family is checked for beyond that, for a diagnosis |
| `peaks` | FLOP/s and bandwidth that chips reach at most, with sources |
| `nvidia_driver` | which driver a CUDA build of torch needs |
| `environment` | the variables a backend wants for training and for rollout |
| `graphs`, `markers` | device graphs; ranges for vendors' profilers (they import torch) |
| `device` | `Device`: the runtime calls of a trainer (imports torch) |
| `testing` | `check_backend`: what a new backend must satisfy |
| `conformance_*` | its parts: names, the device, child processes and what the ranks among them run |
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
