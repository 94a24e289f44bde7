"""What hosts in trouble are advised: what helps there, and nothing that hurts or cannot be done.

Tier 0 is gathered from files; what torch said is made up, so that no process is started.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
from hwgrpo_backends.decide import decide
from hwgrpo_backends.facts import Facts, TorchDevice, TorchFacts
from hwgrpo_backends.tier0 import gather_tier0

from tests.support.devices import hosts
from tests.support.devices.fake_hosts import FakeHost
from tests.support.devices.hosts import BUILTIN, H100, MI300

CUDA, ROCM = ("cuda", "13.0"), ("hip", "7.1")
UNEXPECTED = "CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before"
HEALTHY = ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")
DRIVER = ("update the driver", "new enough")
KFD = "sys/class/kfd/kfd/topology/nodes"


class Case(NamedTuple):
    make: Callable[[FakeHost], FakeHost]
    torch: TorchFacts
    selected: str | None
    advice: tuple[str, ...]
    """What the error, or the warnings, say."""
    never: tuple[str, ...] = ()
    """What they do not say."""


def nvidia(host: FakeHost, *nodes: str) -> FakeHost:
    return host.nodes(*(nodes or HEALTHY)).nvidia_driver("580.95.05").torch(CUDA)


def amd(host: FakeHost, gpus: int = 8, **variables: str) -> FakeHost:
    host.nodes("kfd", "dri/renderD128").torch(ROCM).variables.update(variables)
    for number in range(gpus):
        host.file(f"{KFD}/{number + 1}/gpu_id", "51234\n")
    return host


def wsl(host: FakeHost, *files: str, dxg: bool = True) -> FakeHost:
    host.file("proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n").file(
        "run/systemd/container", "wsl\n"
    )
    for file in files:
        host.file(file)
    return host.nodes("dxg") if dxg else host


def within(host: FakeHost, **variables: str) -> FakeHost:
    host.variables.update(variables)
    return host


def says(problem: str | None = None, hip: bool = False) -> TorchFacts:
    return hosts.saw("7.1" if hip else "13.0", hip=hip, cuda=TorchDevice(problem=problem))


def sees(device: TorchDevice, hip: bool = False, **fields: Any) -> TorchFacts:
    return hosts.saw("7.1" if hip else "13.0", hip=hip, cuda=dataclasses.replace(device, **fields))


LIBCUDA, ROCDXG = "usr/lib/wsl/lib/libcuda.so.1", "opt/rocm/lib/librocdxg.so.1"
FAILED = TorchFacts(
    imported=False, errors=("ChildProcessError: torch was imported in a child process: it took more than 120 seconds",)
)

CASES = {
    # WSL
    "CUDA under WSL": Case(lambda h: wsl(h, LIBCUDA).torch(CUDA), sees(H100), "cuda", ()),
    "CUDA under WSL that torch cannot use": Case(
        lambda h: wsl(h, LIBCUDA).torch(CUDA), says("the driver is too old"), None,
        ("/dev/dxg", "the driver is too old", "update the NVIDIA driver of Windows", "wsl --update"),
        ("modprobe", "/dev/nvidia", "libcuda.so.1, but there is no")),
    "CUDA under WSL without /dev/dxg": Case(
        lambda h: wsl(h, LIBCUDA, dxg=False).torch(CUDA), says(), None,
        ("there is no /dev/dxg", "update the NVIDIA driver of Windows"), ("modprobe", "no /dev/nvidia")),
    "CUDA under WSL whose Windows has no NVIDIA driver": Case(
        lambda h: wsl(h).torch(CUDA), says(), "cpu",
        ("cuda is not used", "update the NVIDIA driver of Windows"), ("modprobe",)),
    "a GPU under WSL and a CPU build of torch": Case(
        lambda h: wsl(h, LIBCUDA).torch(), hosts.saw(), "cpu",
        ("cuda is not used", "/dev/dxg", "install a CUDA build"), ()),
    "WSL, every GPU hidden": Case(
        lambda h: within(wsl(h, LIBCUDA).torch(CUDA), CUDA_VISIBLE_DEVICES=""), says(), "cpu",
        ("CUDA_VISIBLE_DEVICES='' hides every device",)),
    "ROCm under WSL": Case(lambda h: wsl(h, ROCDXG).torch(ROCM), sees(MI300, hip=True), "rocm", ()),
    "ROCm under WSL that torch cannot use": Case(
        lambda h: wsl(h, ROCDXG).torch(ROCM), says(hip=True), None,
        ("an AMD GPU is here (/dev/dxg", "HSA_ENABLE_DXG_DETECTION=1", "AMD driver of Windows"),
        ("rocminfo", "/dev/kfd")),
    "ROCm under WSL without its library": Case(
        lambda h: wsl(h).torch(ROCM), says(hip=True), "cpu",
        ("rocm is not used", "librocdxg", "HSA_ENABLE_DXG_DETECTION")),
    "an AMD GPU under WSL and a CPU build of torch": Case(
        lambda h: wsl(h, ROCDXG).torch(), hosts.saw(), "cpu", ("rocm is not used", "install a ROCm build")),
    # two variables of ROCm
    "a job's GPUs, and the user's among them": Case(
        lambda h: amd(h, ROCR_VISIBLE_DEVICES="4,5,6,7", HIP_VISIBLE_DEVICES="0,1"), sees(MI300, hip=True, count=2),
        "rocm", ()),
    "a job's GPUs, and the user's by the numbers of the host": Case(
        lambda h: amd(h, ROCR_VISIBLE_DEVICES="4,5", HIP_VISIBLE_DEVICES="4,5", SLURM_JOB_ID="7"), says(hip=True), None,
        ("leave none of 8 devices", "unset HIP_VISIBLE_DEVICES, or name numbers from 0 to 1"),
        ("unset ROCR_VISIBLE_DEVICES", "keep only")),
    "a job's GPUs, and one of the user's among them": Case(
        lambda h: amd(h, ROCR_VISIBLE_DEVICES="4,5", HIP_VISIBLE_DEVICES="1,5", SLURM_JOB_ID="7"),
        sees(MI300, hip=True, count=1), "rocm",
        ("leave 1 of the 2 devices that HIP_VISIBLE_DEVICES names", "unset HIP_VISIBLE_DEVICES"),
        ("unset ROCR_VISIBLE_DEVICES", "keep only")),
    "GPUs by their identity, and numbers among them": Case(
        lambda h: amd(h, ROCR_VISIBLE_DEVICES="GPU-1a,GPU-2b", HIP_VISIBLE_DEVICES="1"), sees(MI300, hip=True, count=1),
        "rocm", ()),
    "two names of one variable, alike": Case(
        lambda h: amd(h, CUDA_VISIBLE_DEVICES="0,1", HIP_VISIBLE_DEVICES="0,1"), sees(MI300, hip=True, count=2),
        "rocm", ()),
    "two names of one variable, different": Case(
        lambda h: amd(h, CUDA_VISIBLE_DEVICES="2", HIP_VISIBLE_DEVICES="0"), sees(MI300, hip=True, count=1), "rocm",
        ("only HIP_VISIBLE_DEVICES counts", "unset CUDA_VISIBLE_DEVICES")),
    "a number that no GPU has, in a job": Case(
        lambda h: within(nvidia(h), CUDA_VISIBLE_DEVICES="9", SLURM_JOB_ID="7"), says(), None,
        ("leaves none of 2 devices", "name numbers from 0 to 1 in CUDA_VISIBLE_DEVICES"), ("unset",)),
    # jobs
    "a Slurm job without GPUs": Case(
        lambda h: within(nvidia(h), CUDA_VISIBLE_DEVICES="NoDevFiles", SLURM_JOB_ID="7"), says(), "cpu",
        ("hides every device", "--gres=gpu:N"), ("unset",)),
    "a Slurm job with GPUs that its script hides": Case(
        lambda h: within(nvidia(h), CUDA_VISIBLE_DEVICES="", SLURM_JOB_ID="7", SLURM_JOB_GPUS="2,3"), says(), "cpu",
        ("leave CUDA_VISIBLE_DEVICES as the slurm job sets it", "SLURM_JOB_GPUS='2,3'"), ("unset", "--gres")),
    "a Ray task without GPUs": Case(
        lambda h: within(nvidia(h), CUDA_VISIBLE_DEVICES="", RAY_JOB_ID="1"), says(), "cpu",
        ("num_gpus=N",), ("unset",)),
    "a Slurm job whose cgroup has no GPU": Case(
        lambda h: within(nvidia(h), SLURM_JOB_ID="7"), says(), None, ("--gres=gpu:N",), DRIVER),
    "GPUs hidden by a person": Case(
        lambda h: within(nvidia(h), CUDA_VISIBLE_DEVICES=""), says(), "cpu", ("unset CUDA_VISIBLE_DEVICES",)),
    # drivers that are new enough
    "NVSwitch without its fabric manager": Case(
        nvidia, says(f"{UNEXPECTED} Error 802: system not yet initialized"), None,
        ("Error 802", "systemctl start nvidia-fabricmanager"), (*DRIVER, "container")),
    "libcuda of another driver": Case(
        nvidia, says(f"{UNEXPECTED} Error 803: system has unsupported display driver / cuda driver combination"), None,
        ("restart after an update", "LD_LIBRARY_PATH"), DRIVER),
    "cuda-compat on a GPU for players": Case(
        nvidia, says(f"{UNEXPECTED} Error 804: forward compatibility was attempted on non supported HW"), None,
        ("cuda-compat",), DRIVER),
    "no node for managed memory": Case(
        lambda h: nvidia(h, "nvidia0", "nvidiactl"), says(), None, ("/dev/nvidia-uvm", "modprobe nvidia_uvm"), DRIVER),
    "MIG without instances": Case(
        lambda h: nvidia(h.file("proc/driver/nvidia/capabilities/gpu0/mig/config")), says(), None,
        ("nvidia-smi mig -cgi", "nvidia-smi -mig 0"), DRIVER),
    "MIG with instances": Case(
        lambda h: nvidia(h.file("proc/driver/nvidia/capabilities/gpu0/mig/gi1/access")), says(), None, ("nvidia-smi",),
        (*DRIVER, "-mig 0")),
    "an LXC container that may not open the nodes": Case(
        lambda h: nvidia(h.file("run/systemd/container", "lxc\n")), says(), None,
        ("Proxmox", "host's version of the driver"), (*DRIVER, "--gpus all")),
    "an LXC container without the nodes": Case(
        lambda h: h.file("run/systemd/container", "lxc\n").nvidia_driver("580.95.05").torch(CUDA), says(), None,
        ("no /dev/nvidia", "Proxmox"), ("--gpus all", "modprobe")),
    "an old driver": Case(
        lambda h: h.nodes(*HEALTHY).nvidia_driver("570.86.10").torch(CUDA), says("The driver is too old"), None,
        ("update the driver (here 570.86.10; CUDA 13.0 needs 580 or newer)",)),
    "a driver of unknown version": Case(
        lambda h: h.nodes(*HEALTHY).torch(CUDA), says(), None,
        ("check that the driver (here none found) is new enough",)),
    # chips
    "a Jetson with a CPU build of torch": Case(
        lambda h: h.nodes("nvhost-gpu").file("etc/nv_tegra_release", "# R35 (release), REVISION: 3.1").torch(),
        hosts.saw(), "cpu", ("cuda is not used", "NVIDIA's build of torch for this JetPack"), ("get-started",)),
    "a Jetson with PyPI's torch": Case(
        lambda h: h.nodes("nvidia0", "nvgpu/igpu0/ctrl").torch(CUDA), says(), None,
        ("NVIDIA's build of torch for this JetPack",), (*DRIVER, "modprobe")),
    "a Gaudi": Case(
        lambda h: h.nodes("accel/accel0", "accel/accel_controlD0").torch(), hosts.saw(), "cpu",
        ("Intel Gaudi (hpu) (/dev/accel/accel_controlD0): there is no backend for that",)),
    "the NPU of a laptop's processor, of no use for training": Case(
        lambda h: h.nodes("accel/accel0").torch(), hosts.saw(), "cpu", ()),
    "the only GPU, without kernels": Case(
        nvidia, sees(H100, count=1, names=("GTX 1080",), archs=("sm_61",), built_for=("sm_90",)), None,
        ("no kernels for sm_61", "install a torch build for that GPU"), ("leave it out",)),
    "one of two GPUs, without kernels": Case(
        nvidia, sees(H100, archs=("sm_61", "sm_90"), built_for=("sm_90",)), None,
        ("leave it out with CUDA_VISIBLE_DEVICES",)),
    "the only AMD GPU, without kernels": Case(
        amd, sees(MI300, hip=True, count=1, names=("Radeon",), archs=("gfx1036",), built_for=("gfx942",)), None,
        ("no kernels for gfx1036",), ("leave it out",)),
    # torch that does not answer
    "an import of torch that takes too long": Case(
        nvidia, dataclasses.replace(FAILED, timed_out=True), None,
        ("has not ended in time", "run it again", "importtime"), ("reinstall", "setup.sh")),
    "an import of torch that is killed": Case(
        nvidia, dataclasses.replace(FAILED, errors=("ChildProcessError: it ended with signal SIGKILL: nothing",)), None,
        ("was killed", "more memory"), ("reinstall", "setup.sh")),
    "a torch that is damaged": Case(
        nvidia, dataclasses.replace(FAILED, errors=("OSError: x",)), None, ("reinstall torch",)),
}  # fmt: skip


def facts_of(host: FakeHost, torch: TorchFacts) -> Facts:
    facts = gather_tier0(host.root, host.variables, BUILTIN.values(), host.path)
    return dataclasses.replace(facts, torch=torch)


@pytest.mark.parametrize("name", CASES)
def test_a_host_is_advised_what_helps_and_nothing_else(tmp_path, name):
    case = CASES[name]
    facts = facts_of(case.make(FakeHost(tmp_path)), case.torch)
    decision = decide(facts, "auto", BUILTIN)
    said = decision.error or "\n".join(decision.warnings)
    assert decision.selected == case.selected, said
    assert bool(said) == bool(case.advice), said
    for words in case.advice:
        assert words in said, said
    for words in case.never:
        assert words not in said, said


@pytest.mark.parametrize("name", CASES)
def test_the_diagnosis_does_not_contradict_the_decision(tmp_path, name):
    case = CASES[name]
    report = hosts.diagnosis(facts_of(case.make(FakeHost(tmp_path)), case.torch))
    said = "\n".join(f"{each.found} {each.fix}" for each in report.findings if each.state != "ok")
    assert report.decision.selected == case.selected
    for words in set(case.never) - {"container", "setup.sh", "/dev/nvidia"}:
        assert words not in said, said


@pytest.mark.parametrize(
    ("make", "backend", "where"),
    [
        (lambda h: wsl(h, LIBCUDA).torch(CUDA), "cuda", "/dev/dxg, /usr/lib/wsl/lib/libcuda.so.1"),
        (lambda h: wsl(h, ROCDXG).torch(ROCM), "rocm", "/dev/dxg, /opt/rocm/lib/librocdxg.so.1"),
    ],
)
def test_under_wsl_a_gpu_is_found_before_torch_is_asked(tmp_path, make, backend, where):
    host = make(FakeHost(tmp_path))
    decision = decide(gather_tier0(host.root, {}, BUILTIN.values(), host.path), "auto", BUILTIN)
    assert decision.selected == backend
    assert decision.verdicts[backend].state == "unverified"
    assert where in decision.verdicts[backend].reason


@pytest.mark.parametrize(
    ("variables", "present", "left"),
    [
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,1"}, 8, 2),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"}, 8, 0),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1,2"}, 8, 1),
        ({"ROCR_VISIBLE_DEVICES": "9"}, 8, 0),
        ({"HIP_VISIBLE_DEVICES": "0,9,1"}, 8, 1),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0,1,2"}, 8, 3),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 8, 1),
        ({}, 8, 8),
    ],
)
def test_variables_are_applied_in_their_order(tmp_path, variables: Mapping[str, str], present, left):
    host = amd(FakeHost(tmp_path), present, **variables)
    decision = decide(gather_tier0(host.root, host.variables, BUILTIN.values(), host.path), "auto", BUILTIN)
    assert decision.verdicts["rocm"].devices == left
