"""`hwgrpo detect --probe` on the hosts that detection is known to stumble over: files and packages made up, code real.

`test_decide.py` has these and more as facts; here the facts are gathered too, by both tiers.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hwgrpo_backends import tier1
from hwgrpo_backends.decide import decide
from hwgrpo_backends.facts import Facts
from hwgrpo_backends.tier0 import gather_tier0
from hwgrpo_backends.tier1 import gather_tier1

from tests.support.devices import hosts
from tests.support.devices.fake_hosts import FakeHost
from tests.support.devices.hosts import BUILTIN

RUN = """
import functools, os, sys
from hwgrpo.cli import detect
from hwgrpo.cli.main import main
detect.gather_tier0 = functools.partial(detect.gather_tier0, root=os.environ["FAKE_ROOT"])
code = main(["detect", *sys.argv[1:]])
assert "torch" not in sys.modules
raise SystemExit(code)
"""
H100 = {"name": "NVIDIA H100", "arch": "sm_90", "count": 2}
MI300 = {"name": "AMD Instinct MI300X", "arch": "gfx942", "count": 8}
NPU = {"name": "Ascend910B1", "count": 8}
NO_CANN = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')"
SEES_NPUS = f"torch.DEVICES['npu'] = torch.Devices(**{NPU})"
RAISES = "torch.DEVICES['npu'] = torch.Devices(problem='driver not found')"
TRANSFER_TO_NPU = f"{SEES_NPUS}\ntorch.DEVICES['cuda'] = torch.DEVICES['npu']"
CUDA, ROCM = ("cuda", "13.0"), ("hip", "7.1")
CHIP = """
import dataclasses
from hwgrpo_backends import Verdict, registry
there = Verdict(state="ok", reason="1 x Chip", devices=1, claimed=True, hardware="present")
BACKEND = dataclasses.replace(registry.get("npu"), name="chip", probe=lambda facts: there)
"""


def chip(host: FakeHost, module: str = CHIP) -> FakeHost:
    """Let a plug-in for another accelerator be installed."""
    (host.site / "chip_plugin.py").write_text(module)
    return host.distribution("chip", "1.0", "[hwgrpo.backends]\nchip = chip_plugin:BACKEND\n")


class Trap(NamedTuple):
    make: Callable[[FakeHost], FakeHost]
    selected: str | None
    words: tuple[str, ...] = ()
    """What the error, or a warning, says; none where nothing is to be said."""


TRAPS = {
    "torch-npu importable, no NPU": Trap(
        lambda h: h.torch().torch_npu(), "cpu", ("npu is not used: no sign of an Ascend NPU",)),
    "torch-npu whose is_available raises, no NPU": Trap(
        lambda h: h.torch().torch_npu(RAISES), "cpu", ("npu is not used: no sign of an Ascend NPU",)),
    "torch-npu importable, no NPU, a working NVIDIA GPU": Trap(
        lambda h: h.nodes("nvidia0").torch(CUDA, {"cuda": H100}).torch_npu(), "cuda"),
    "CUDA without nvidia-smi": Trap(
        lambda h: h.nodes("nvidia0", "nvidia1", "nvidiactl").torch(CUDA, {"cuda": H100}), "cuda"),
    "HIP, which torch calls cuda": Trap(
        lambda h: h.nodes("kfd", "dri/renderD128").file("sys/class/kfd/kfd/topology/nodes/1/gpu_id", "51234\n")
        .torch(ROCM, {"cuda": MI300}), "rocm"),
    "torch.cuda answers on NPUs (transfer_to_npu)": Trap(
        lambda h: h.nodes("davinci0").torch().torch_npu(TRANSFER_TO_NPU), "npu"),
    "vllm-ascend on a CUDA host": Trap(
        lambda h: h.nodes("nvidia0").torch(CUDA, {"cuda": H100})
        .distribution("vllm-ascend", "0.23.0", "[vllm.platform_plugins]\nascend = vllm_ascend:register\n"), "cuda"),
    "a discrete NVIDIA GPU and an integrated AMD one": Trap(
        lambda h: h.nodes("nvidia0", "kfd").file("sys/class/kfd/kfd/topology/nodes/1/gpu_id", "4098\n")
        .torch(CUDA, {"cuda": H100}), "cuda"),
    "an integrated AMD GPU under a CPU build": Trap(
        lambda h: h.nodes("kfd").file("sys/class/kfd/kfd/topology/nodes/1/gpu_id", "4098\n").torch(), "cpu",
        ("rocm is not used", "install a ROCm build")),
    "torch-npu without CANN, NPUs there": Trap(
        lambda h: h.nodes("davinci0").torch().torch_npu(NO_CANN), None, ("libhccl.so", "Fix: source the set_env.sh")),
    "a stray torch-npu beside a working NVIDIA GPU": Trap(
        lambda h: h.nodes("nvidia0").torch(CUDA, {"cuda": H100}).torch_npu(NO_CANN), None,
        ("libhccl.so", "Fix: pip uninstall torch-npu, as there is no sign of an NPU")),
    "torch-npu without CANN, nothing there": Trap(
        lambda h: h.torch().torch_npu(NO_CANN), None, ("libhccl.so", "pip uninstall torch-npu")),
    "torch-npu beside a CUDA build of torch": Trap(
        lambda h: h.nodes("davinci0").torch(CUDA).torch_npu("raise RuntimeError('Two accelerators')"), None,
        ("torch-npu refuses torch 2.13.0", "CPU build of torch")),
    "torch-npu for another torch": Trap(
        lambda h: h.nodes("davinci0").torch().torch_npu(version="2.10.0"), None, ("torch-npu 2.10.0 does not fit",)),
    "an NVIDIA driver older than torch wants": Trap(
        lambda h: h.nodes("nvidia0").nvidia_driver("470.82")
        .torch(CUDA, {"cuda": {"problem": "The NVIDIA driver on your system is too old"}}), None,
        ("driver on your system is too old", "470.82", "CUDA 13.0")),
    "an NVIDIA driver newer than torch needs": Trap(
        lambda h: h.nodes("nvidia0").nvidia_driver("610.10").torch(CUDA, {"cuda": H100}), "cuda"),
    "a GPU this torch has no kernels for": Trap(
        lambda h: h.nodes("nvidia0").torch(CUDA, {"cuda": H100 | {"arch": "sm_61", "built_for": ["sm_90"]}}), None,
        ("no kernels for sm_61",)),
    "every GPU hidden": Trap(
        lambda h: hidden(h.nodes("nvidia0").torch(CUDA), CUDA_VISIBLE_DEVICES=""), "cpu",
        ("CUDA_VISIBLE_DEVICES='' hides every device",)),
    "WSL, which has no device nodes": Trap(
        lambda h: h.nodes("dxg").file("proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n")
        .torch(CUDA, {"cuda": H100}), "cuda"),
    "a container that was given no GPU": Trap(
        lambda h: h.file(".dockerenv").nvidia_driver("580.95.05").torch(CUDA), None,
        ("/proc/driver/nvidia/version", "no /dev/nvidia", "--gpus all", "nvidia.com/gpu", "backend.name=cpu")),
    "a container with the driver's libraries and no GPU": Trap(
        lambda h: h.file("usr/lib/x86_64-linux-gnu/libcuda.so.1").nodes("nvidiactl").torch(CUDA), None,
        ("/dev/nvidiactl", "--gpus all", "backend.name=cpu")),
    "a pod that asked for no NPU": Trap(
        lambda h: h.file("usr/local/Ascend/driver/version.info", "Version=25.2.0\n").torch().torch_npu(), None,
        ("/usr/local/Ascend/driver/version.info", "no /dev/davinci", "--device=/dev/davinci0", "backend.name=cpu")),
    "a pod with the manager of NPUs alone": Trap(
        lambda h: h.nodes("davinci_manager").torch().torch_npu(), None, ("/dev/davinci_manager", "/dev/davinci0")),
    "a container without /dev/kfd": Trap(
        lambda h: h.file("sys/class/kfd/kfd/topology/nodes/1/gpu_id", "51234\n").torch(ROCM), None,
        ("no /dev/kfd", "--device=/dev/kfd --device=/dev/dri", "backend.name=cpu")),
    "a container with /dev/kfd and without /dev/dri": Trap(
        lambda h: h.nodes("kfd").file("sys/class/kfd/kfd/topology/nodes/1/gpu_id", "51234\n").torch(ROCM), None,
        ("/dev/kfd", "no /dev/dri/renderD", "--device=/dev/dri", "backend.name=cpu")),
    "a container without a GPU, whose torch is for the CPU": Trap(
        lambda h: h.file(".dockerenv").nvidia_driver("580.95.05").torch(), "cpu"),
    "a container without a GPU, on purpose": Trap(
        lambda h: hidden(h.nvidia_driver("580.95.05").torch(CUDA), CUDA_VISIBLE_DEVICES=""), "cpu",
        ("CUDA_VISIBLE_DEVICES='' hides every device",)),
    "a laptop with the default torch": Trap(
        lambda h: h.torch(CUDA), "cpu", ("cuda is not used: no sign of an NVIDIA GPU", "or of its driver")),
    "hardware under a CPU build of torch": Trap(
        lambda h: h.nodes("nvidia0").torch(), "cpu", ("cuda is not used", "install a CUDA build")),
    "nothing at all": Trap(lambda h: h.torch(), "cpu"),
    "a torch that does not import": Trap(
        lambda h: h.torch(text="raise ImportError('libtorch.so')"), None, ("libtorch.so", "reinstall")),
    "a file torch.py in a folder of PYTHONPATH": Trap(
        lambda h: h.torch().module("torch.py", "x = 1\n"), None, ("first/torch.py is imported in its place", "rename")),
    "a folder torch in a folder of PYTHONPATH": Trap(
        lambda h: h.torch().module("torch/__init__.py"), None,
        ("first/torch/__init__.py is imported in its place", "rename")),
    "a file torch.py beside a GPU": Trap(
        lambda h: h.nodes("nvidia0").torch(CUDA, {"cuda": H100}).module("torch.py", "raise SystemExit\n"), None,
        ("first/torch.py is imported",)),
    "a file of Python's name that stops torch": Trap(
        lambda h: h.module("wave.py", "raise ImportError('mine')\n").torch(text="import wave\n"), None,
        ("mine", "first/wave.py", "rename")),
    "a file of Python's name that stops nothing": Trap(lambda h: h.module("wave.py").torch(), "cpu"),
    "another folder torch that is no package": Trap(lambda h: h.torch().module("torch/notes.txt"), "cpu"),
    "two accelerators that work": Trap(
        lambda h: chip(h.nodes("nvidia0").torch(CUDA, {"cuda": H100})), None,
        ("cuda: 2 x NVIDIA H100", "chip: 1 x Chip", "HWGRPO_BACKEND=")),
    "a plug-in that does not import, beside a GPU": Trap(
        lambda h: chip(h.nodes("nvidia0").torch(CUDA, {"cuda": H100}), "raise OSError('libchip.so')"), "cuda"),
    "two variables of which one names what the other leaves out": Trap(
        lambda h: hidden(
            h.nodes("kfd").torch(ROCM, {"cuda": MI300}), HIP_VISIBLE_DEVICES="0,4", ROCR_VISIBLE_DEVICES="4,5"), "rocm",
        ("unset HIP_VISIBLE_DEVICES",)),
    "two names of one variable": Trap(
        lambda h: hidden(
            h.nodes("kfd").torch(ROCM, {"cuda": MI300}), HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1"), "rocm",
        ("unset CUDA_VISIBLE_DEVICES",)),
    "an AMD GPU under WSL": Trap(
        lambda h: h.nodes("dxg").file("opt/rocm/lib/librocdxg.so").torch(ROCM, {"cuda": MI300}), "rocm"),
    "a GPU under WSL that torch cannot use": Trap(
        lambda h: h.nodes("dxg").file("usr/lib/wsl/lib/libcuda.so.1").torch(CUDA), None,
        ("/dev/dxg", "update the NVIDIA driver of Windows")),
}  # fmt: skip


def hidden(host: FakeHost, **variables: str) -> FakeHost:
    host.variables.update(variables)
    return host


IN_ITS_OWN_PROCESS = [name for name in TRAPS if "accelerators that work" in name or "plug-in" in name]
"""Plug-ins are looked for once per process; these also have the exit statuses and the text of the command."""


@pytest.mark.parametrize("name", [name for name in TRAPS if name not in IN_ITS_OWN_PROCESS])
def test_detection_is_not_caught_by(tmp_path, monkeypatch, name):
    trap = TRAPS[name]
    decision = decide(gathered(trap.make(FakeHost(tmp_path)), monkeypatch), "auto", BUILTIN)
    assert decision.selected == trap.selected, decision
    said = decision.error or "\n".join(decision.warnings)
    assert bool(said) == bool(trap.words), said
    for word in trap.words:
        assert word in said


def gathered(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Facts:
    """Return what both tiers find on a host."""
    monkeypatch.setattr(tier1, "_cache", {})
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(host.path), **host.variables}
    facts = gather_tier0(host.root, environ, BUILTIN.values(), [*host.path, *sys.path])
    return gather_tier1(facts, environ, BUILTIN.values())


@pytest.mark.parametrize("name", IN_ITS_OWN_PROCESS)
def test_the_command_is_not_caught_by(tmp_path, name):
    trap = TRAPS[name]
    result = trap.make(FakeHost(tmp_path)).run(RUN, "--probe", "--json")
    assert result.returncode == (1 if trap.selected is None else 0), result.stdout + result.stderr
    document = json.loads(result.stdout)
    assert document["selected"] == trap.selected, document
    said = document["error"] or "\n".join(document["warnings"])
    assert bool(said) == bool(trap.words), said
    for word in trap.words:
        assert word in said


def test_looking_opens_no_device_in_the_process_that_looks(tmp_path):
    # A device initialised here could not be used in a forked child, and every worker would land on device 0.
    opened = "import os; open(os.environ['FAKE_ROOT'] + '/opened_by_' + str(os.getpid()), 'w')\n"
    host = FakeHost(tmp_path).nodes("nvidia0").torch(CUDA, text=opened + "raise RuntimeError('opened')")
    code = RUN.replace("code = main", "print(os.getpid(), file=sys.stderr)\ncode = main")
    result = host.run(code, "--probe")
    assert result.returncode == 1
    processes = {path.name.removeprefix("opened_by_") for path in host.root.glob("opened_by_*")}
    assert processes
    assert result.stderr.split()[0] not in processes


REMEDIED = {name: trap.make for name, trap in TRAPS.items() if trap.words and "accelerators that" not in name} | {
    "vllm-ascend beside the trainer": TRAPS["vllm-ascend on a CUDA host"].make,
    "both tritons": lambda h: h.nodes("nvidia0").torch(CUDA, {"cuda": H100}).distribution("triton", "3.7.1")
    .distribution("triton-ascend", "3.2.2"),
    "a damaged list of entry points": lambda h: damaged(h.torch()),
    "CANN installed and not sourced": lambda h: h.nodes("davinci0").file("usr/local/Ascend/cann/set_env.sh", CANN)
    .torch().torch_npu("import os\nos.environ['ASCEND_HOME_PATH']"),
    "another chip pretended": lambda h: hidden(
        h.nodes("kfd", "dri/renderD128").torch(ROCM, {"cuda": MI300}), HSA_OVERRIDE_GFX_VERSION="11.0.0"),
}  # fmt: skip
CANN = "export ASCEND_HOME_PATH=/usr/local/Ascend/cann\n"


def damaged(host: FakeHost) -> FakeHost:
    host.distribution("evil", "1.0")
    (host.site / "evil-1.0.dist-info/entry_points.txt").write_bytes(b"\xff\xfe[torch.backends]\n")
    return host


def unset(host: FakeHost, name: str) -> None:
    host.variables.pop(name, None)


def source(host: FakeHost, file: str) -> None:
    text = (host.root / file.lstrip("/")).read_text()
    host.variables.update(line.removeprefix("export ").split("=", 1) for line in text.splitlines())


def uninstall(host: FakeHost, names: str) -> None:
    for name in names.replace("-", "_").split():
        for file in [*host.site.glob(f"{name}-*.dist-info"), host.site / name, host.site / f"{name}.py"]:
            shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)


def install_anew(host: FakeHost, name: str) -> None:
    (host.site / f"{name}-1.0.dist-info/entry_points.txt").write_text("")


def set_variable(host: FakeHost, name: str, value: str) -> None:
    host.variables[name] = value


def set_up(host: FakeHost) -> None:
    """Stand for set-up; tests/setup/test_damage.py runs the real one on the same kinds of damage."""
    version = host.site / "torch" / "version.py"
    build = re.search(r"^(cuda|hip) = '(.+)'", version.read_text(), re.M) if version.exists() else None
    had_npu = (host.site / "torch_npu.py").exists()
    uninstall(host, "torch torch-npu")
    host.torch((build[1], build[2]) if build else None)
    if had_npu:
        host.torch_npu()


def rename(host: FakeHost, file: str) -> None:
    assert Path(file).is_relative_to(host.first)
    Path(file).rename(f"{file}.mine")


COMMANDS = {
    r"\bunset ([A-Z_]{4,})": unset,
    r"\bsource (/\S+\.sh)": source,
    r"pip uninstall (?:-y )?([a-z]+(?:-[a-z]+)*(?: triton-ascend)?)": uninstall,
    r"pip install --force-reinstall (\w+)": install_anew,
    r"\b(HWGRPO_BACKEND|TORCH_DEVICE_BACKEND_AUTOLOAD)=(\w+)": set_variable,
    r"\bbash scripts/setup\.sh(?! --rollout)": set_up,
    r"\bbash scripts/setup\.sh --rollout (\S+)": uninstall,
    r"\brename (/[^\s,]+)": rename,
}
"""What a fix may say to type, and what typing it does to a host."""
BY_HAND = (
    r"^(start the container|check |update the (NVIDIA )?driver|install |see that|add this user|repair or uninstall|"
    "source the set_env.sh|pip install 'transformers|where the host has some|more than one accelerator|unset it where)"
)


def complaints(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], str | None]:
    """Return each complaint of `hwgrpo detect --probe` and `hwgrpo doctor` with its remedy, and what is selected."""
    report = hosts.diagnosis(gathered(host, monkeypatch))
    said = {f"{each.what}: {each.found}": each.fix for each in report.findings if each.state != "ok"}
    said |= {f"{name}: {verdict.reason}": verdict.fix for name, verdict in report.decision.verdicts.items()}
    if report.decision.error:
        said[report.decision.error] = report.decision.error
    return {complaint: fix for complaint, fix in said.items() if fix}, report.decision.selected


def make(folder: Path, name: str) -> FakeHost:
    folder.mkdir()
    return REMEDIED[name](FakeHost(folder))


@pytest.mark.parametrize("name", REMEDIED)
def test_a_command_that_is_given_as_a_remedy_ends_the_complaint_on(tmp_path, monkeypatch, name):
    here, there = tmp_path / "before", tmp_path / "after"
    before, _ = complaints(make(here, name), monkeypatch)
    commands = {}
    for complaint, fix in before.items():
        text = re.sub(r"\([^)]*does not help[^)]*\)", "", fix)
        found = [(apply, match.groups()) for pattern, apply in COMMANDS.items() for match in re.finditer(pattern, text)]
        assert found or re.search(BY_HAND, fix), f"neither a command nor work for a person: {fix}"
        for command in found:
            commands.setdefault(command, []).append(complaint)
    for (apply, arguments), ended in commands.items():
        host = make(there, name)
        apply(host, *(each.replace(str(here), str(there)) for each in arguments))
        after, selected = complaints(host, monkeypatch)
        shutil.rmtree(there)
        if arguments[:1] == ("HWGRPO_BACKEND",):
            assert selected == arguments[1]
        else:
            left = [complaint for complaint in ended if complaint.replace(str(here), str(there)) in after]
            assert not left, (apply.__name__, arguments, left)
