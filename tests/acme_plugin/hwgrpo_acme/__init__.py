"""hwgrpo on Acme accelerators, through torch-acme: data plus three functions. Importing it imports no torch.

`kernels` holds device-specific kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwgrpo_backends import Backend, EnvVar, Facts, Verdict
from hwgrpo_backends.probing import Problem, judge, torch_problem

if TYPE_CHECKING:
    import torch

NODES = "acme[0-9]*"
VISIBLE = "ACME_VISIBLE_DEVICES"
INSTALL = "the CPU build of torch with torch-acme of the same version"


def probe(facts: Facts) -> Verdict:
    """Judge from torch-acme, /dev/acme* and, if torch was probed, its device count."""
    return judge(
        facts,
        BACKEND,
        chip="an Acme accelerator",
        nodes=facts.nodes(NODES),
        where=f"/dev/{NODES}",
        claimed="torch-acme" in facts.distributions,
        problem=_problem(facts),
        broken_fix=lambda device: "check that the driver and torch-acme are of the same release",
    )


def _problem(facts: Facts) -> Problem | None:
    """Return what is wrong with the installed stack; checks causes before symptoms."""
    if facts.torch_version is None:
        return torch_problem(facts)
    if "torch-acme" not in facts.distributions:
        return "torch-acme is not installed", f"install {INSTALL}"
    return torch_problem(facts)


def arch(index: int) -> str:
    """Return the chip of device `index` in lower case, as "acme_one"."""
    import torch

    return torch.get_device_module("acme").get_device_name(index).lower().replace(" ", "_")


def compute_dtypes(index: int) -> tuple[torch.dtype, ...]:
    """Return the dtypes that device `index` computes in natively, the one to train in first."""
    import torch

    return torch.bfloat16, torch.float32


BACKEND = Backend(
    name="acme",
    device_type="acme",
    plugin="torch_acme",
    visible_env=VISIBLE,
    device_nodes=(NODES,),
    packages=("torch-acme",),
    comm="acmecl",
    kernels=("acme", "torch"),
    attention=("sdpa", "eager"),
    rollout=("local",),
    env_train={
        "ACME_SUBMIT_THREADS": EnvVar(value="1", why="a second thread that submits operators waits for the first"),
    },
    torch_build=INSTALL,
    probe=probe,
    arch=arch,
    compute_dtypes=compute_dtypes,
)
