"""`hwgrpo detect --probe` on the hosts that detection is known to stumble over: files and packages made up, code real.

`test_decide.py` has these and more as facts; here the facts are gathered too, by both tiers.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

import pytest
from fake_hosts import FakeHost

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
        lambda h: h.nodes("davinci0").torch().torch_npu(NO_CANN), None, ("libhccl.so", "set_env.sh")),
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
        lambda h: h.module("torch.py", "x = 1\n"), None, ("site/torch.py is imported in its place", "rename")),
    "a folder torch in a folder of PYTHONPATH": Trap(
        lambda h: h.module("torch/__init__.py"), None, ("site/torch/__init__.py is imported in its place", "rename")),
    "a file torch.py beside a GPU": Trap(
        lambda h: h.nodes("nvidia0").module("torch.py", "raise SystemExit\n"), None, ("site/torch.py is imported",)),
    "a file of Python's name that stops torch": Trap(
        lambda h: h.module("wave.py", "raise ImportError('mine')\n").torch(text="import wave\n"), None,
        ("mine", "site/wave.py", "rename")),
    "a file of Python's name that stops nothing": Trap(lambda h: h.module("wave.py").torch(), "cpu"),
    "another folder torch that is no package": Trap(lambda h: h.module("torch/notes.txt"), "cpu"),
    "two accelerators that work": Trap(
        lambda h: chip(h.nodes("nvidia0").torch(CUDA, {"cuda": H100})), None,
        ("cuda: 2 x NVIDIA H100", "chip: 1 x Chip", "HWGRPO_BACKEND=")),
    "a plug-in that does not import, beside a GPU": Trap(
        lambda h: chip(h.nodes("nvidia0").torch(CUDA, {"cuda": H100}), "raise OSError('libchip.so')"), "cuda"),
    "two variables that filter one another": Trap(
        lambda h: hidden(
            h.nodes("kfd").torch(ROCM, {"cuda": MI300}), HIP_VISIBLE_DEVICES="0", ROCR_VISIBLE_DEVICES="1"), "rocm",
        ("keep only HIP_VISIBLE_DEVICES",)),
}  # fmt: skip


def hidden(host: FakeHost, **variables: str) -> FakeHost:
    host.variables.update(variables)
    return host


@pytest.mark.parametrize("name", TRAPS)
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
