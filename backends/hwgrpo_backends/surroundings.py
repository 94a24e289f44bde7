"""What a process runs inside of: a container, WSL, a scheduler's job. Read from a few files and variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

CONTAINER_FILES = {".dockerenv": "docker", "run/.containerenv": "podman"}
CONTAINER_VARIABLES = {
    "KUBERNETES_SERVICE_HOST": "kubernetes",
    "APPTAINER_CONTAINER": "apptainer",
    "SINGULARITY_CONTAINER": "singularity",
}
CGROUP_WORDS = {
    "kubepods": "kubernetes",
    "docker": "docker",
    "libpod": "podman",
    "containerd": "containerd",
    "lxc": "lxc",
}
SYSTEMD_CONTAINER = "run/systemd/container"
"""Where systemd keeps the kind of container that it runs in; for it WSL is one, too."""


class Job(NamedTuple):
    """A scheduler whose jobs are given devices, or none."""

    name: str
    request: str
    """How a job asks for devices."""


JOBS = {
    "SLURM_JOB_ID": Job("slurm", "--gres=gpu:N (Slurm)"),
    "RAY_JOB_ID": Job("ray", "num_gpus=N of the task or actor (Ray)"),
    "PBS_JOBID": Job("pbs", "-l select=1:ngpus=N (PBS)"),
    "LSB_JOBID": Job("lsf", "-gpu num=N (LSF)"),
}
"""Variable of a job -> its scheduler."""
JOB_DEVICES = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE")
"""Variables that a job has only where it was given devices."""
VARIABLES = (*CONTAINER_VARIABLES, *JOBS, *JOB_DEVICES, "SLURM_PROCID", "TORCHELASTIC_RUN_ID")


def container(root: Path, environ: Mapping[str, str]) -> str | None:
    """Return which kind of container this is, or None. Some show no sign of themselves."""
    by_file = (kind for file, kind in CONTAINER_FILES.items() if exists(root / file))
    by_variable = (kind for name, kind in CONTAINER_VARIABLES.items() if environ.get(name))
    by_systemd = (kind for kind in [read(root / SYSTEMD_CONTAINER).strip()] if kind and kind != "wsl")
    cgroup = read(root / "proc/1/cgroup")
    by_cgroup = (kind for word, kind in CGROUP_WORDS.items() if word in cgroup)
    return next(iter((*by_variable, *by_file, *by_systemd, *by_cgroup)), None)


def is_wsl(root: Path) -> bool:
    """Return whether the kernel is that of the Windows Subsystem for Linux."""
    return "microsoft" in read(root / "proc/sys/kernel/osrelease").lower()


def job(variables: Mapping[str, str]) -> Job | None:
    """Return the scheduler whose job this process belongs to, or None."""
    return next((job for name, job in JOBS.items() if variables.get(name)), None)


def job_devices(variables: Mapping[str, str]) -> str | None:
    """Return what says that the job was given devices, as NAME='value', or None."""
    return next((f"{name}={variables[name]!r}" for name in JOB_DEVICES if variables.get(name)), None)


def scheduler(environ: Mapping[str, str]) -> str | None:
    """Return what started this process, as text, where it left its variables; or None."""
    jobs = [f"{job.name} job {environ[name]}" for name, job in JOBS.items() if environ.get(name)]
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        jobs.append(f"rank {environ['RANK']} of {environ['WORLD_SIZE']}")
    return ", ".join(jobs) or None


def read(file: Path) -> str:
    """Return a small text file, or "" where it is not there or may not be read: then nothing is known."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def exists(file: Path) -> bool:
    """Return whether a file is there; one below a folder that may not be entered counts as absent."""
    try:
        return file.exists()
    except OSError:
        return False


def search(file: Path, pattern: str) -> str | None:
    """Return the match of `pattern`'s group in a file, "unknown" without a match, None without the file."""
    text = read(file)
    if not text:
        return "unknown" if exists(file) else None
    match = re.search(pattern, text)
    return match[1] if match else "unknown"
