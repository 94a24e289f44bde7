"""Tier 0 against a made-up root folder and made-up distributions; tier 1 against the real torch and broken ones."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from hwgrpo_backends import nvidia_driver, registry, tier1
from hwgrpo_backends.facts import Facts, TorchFacts
from hwgrpo_backends.tier0 import gather_tier0
from hwgrpo_backends.tier1 import gather_tier1

from tests.support.devices.nvidia_version_files import VERSION_FILES

BACKENDS = tuple(registry.get(name) for name in registry.BUILTIN)


def write(file: Path, text: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def install(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    """Make a distribution of metadata only."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        write(info / "entry_points.txt", entry_points)


def tier0(root: Path, site: Path, environ=None) -> Facts:
    return gather_tier0(root, environ or {}, BACKENDS, [str(site)])


def torch_version_file(site: Path, version: str, cuda: str | None = None, hip: str | None = None) -> None:
    lines = [
        "from typing import Optional",
        f"__version__ = {version!r}",
        f"cuda: Optional[str] = {cuda!r}",
        f"hip: Optional[str] = {hip!r}",
    ]
    write(site / "torch" / "version.py", "\n".join(lines))


def test_an_empty_host_has_no_facts(tmp_path):
    facts = tier0(tmp_path / "nowhere", tmp_path)
    assert facts.device_nodes == ()
    assert facts.distributions == {}
    assert (facts.torch_version, facts.torch_build, facts.nvidia_driver, facts.cann) == (None, None, None, None)


def test_device_nodes_are_found_and_their_neighbours_are_not(tmp_path):
    for node in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "davinci3", "davinci_manager", "kfd", "null"):
        write(tmp_path / "dev" / node)
    facts = tier0(tmp_path, tmp_path / "site")
    assert facts.device_nodes == ("davinci3", "kfd", "nvidia0", "nvidia11")
    assert facts.nodes("nvidia[0-9]*") == ("nvidia0", "nvidia11")


def test_nodes_in_folders_of_dev_and_files_of_drivers_are_found(tmp_path):
    for file in ("dev/kfd", "dev/dri/card0", "dev/dri/renderD128", "dev/davinci_manager", "proc/driver/nvidia/version"):
        write(tmp_path / file)
    write(tmp_path / "usr/lib64/libcuda.so.1")
    facts = tier0(tmp_path, tmp_path / "site")
    assert facts.device_nodes == ("dri/renderD128", "kfd")
    assert facts.driver_files == ("/dev/davinci_manager", "/proc/driver/nvidia/version", "/usr/lib64/libcuda.so.1")


def test_nodes_this_user_may_not_open_are_named(tmp_path, monkeypatch):
    write(tmp_path / "dev" / "kfd")
    write(tmp_path / "dev" / "nvidia0")
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda file, mode: Path(file).name != "kfd" and allowed(file, mode))
    assert tier0(tmp_path, tmp_path / "site").no_access == ("kfd",)


@pytest.mark.parametrize("name", VERSION_FILES)
def test_the_version_of_the_driver_is_read_and_no_other_number(tmp_path, name):
    file = VERSION_FILES[name]
    write(tmp_path / "proc/driver/nvidia/version", file.text)
    driver = tier0(tmp_path, tmp_path / "site").nvidia_driver
    assert driver == (file.driver or "unknown")
    assert nvidia_driver.is_too_old(driver, "13.0") is file.is_too_old


def test_drivers_and_toolkits_are_read_from_their_records(tmp_path):
    write(
        tmp_path / "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\nGCC version: gcc 13\n",
    )
    write(tmp_path / "etc/ascend_install.info", "UserName=HwHiAiUser\nDriver_Version=25.2.0\n")
    facts = tier0(tmp_path, tmp_path / "site", {"ASCEND_HOME_PATH": "/usr/local/Ascend"})
    assert facts.nvidia_driver == "580.95.05"
    assert facts.cann == "25.2.0"
    assert facts.variables == {"ASCEND_HOME_PATH": "/usr/local/Ascend"}


def test_gpus_are_counted_in_the_topology_and_processors_are_not(tmp_path):
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for node, gpu_id in enumerate(("0", "51140", "22978")):
        write(nodes / str(node) / "gpu_id", gpu_id + "\n")
    assert tier0(tmp_path, tmp_path / "site").kfd_gpus == 2
    assert tier0(tmp_path / "other", tmp_path / "site").kfd_gpus is None


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "build"),
    [
        ("2.13.0", "13.0", None, "cuda"),  # the default wheel carries no tag
        ("2.13.0+cu130", "13.0", None, "cuda"),
        ("2.13.0+rocm7.1", None, "7.1.25424", "rocm"),
        ("2.13.0+cpu", None, None, "cpu"),
        ("2.9.0a0+50eac811a6.nv25.09", "13.0", None, "cuda"),  # a vendor's container carries its own tag
    ],
)
def test_the_build_of_torch_is_read_from_its_version_file(tmp_path, version, cuda, hip, build):
    torch_version_file(tmp_path, version, cuda, hip)
    facts = tier0(tmp_path, tmp_path)
    assert (facts.torch_version, facts.torch_build) == (version, build)


@pytest.mark.parametrize(
    ("version", "build"),
    [("2.13.0+cpu", "cpu"), ("2.13.0+cu128", "cuda"), ("2.13.0+rocm6.4", "rocm"), ("2.13.0", None)],
)
def test_without_a_version_file_the_local_tag_tells_the_build(tmp_path, version, build):
    install(tmp_path, "torch", version)
    assert tier0(tmp_path, tmp_path).torch_build == build


def test_the_torch_that_would_be_imported_is_the_one_that_counts(tmp_path):
    torch_version_file(tmp_path / "first", "2.13.0+cpu")
    torch_version_file(tmp_path / "second", "2.14.0", cuda="13.0")
    facts = gather_tier0(tmp_path, {}, BACKENDS, [str(tmp_path / "first"), str(tmp_path / "second")])
    assert facts.torch_version == "2.13.0+cpu"


def test_distributions_and_torch_plug_ins_are_found(tmp_path):
    install(tmp_path, "torch-npu", "2.13.0", "[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    install(tmp_path, "triton-ascend", "3.2.2")
    install(tmp_path, "triton", "3.7.1")
    install(tmp_path, "unrelated", "1.0")
    facts = tier0(tmp_path, tmp_path)
    assert facts.distributions == {"torch-npu": "2.13.0", "triton": "3.7.1", "triton-ascend": "3.2.2"}
    assert facts.torch_plugins == ("torch_npu",)


def test_only_watched_variables_are_kept(tmp_path):
    environ = {"HIP_VISIBLE_DEVICES": "0", "RANK": "3", "AWS_SECRET_ACCESS_KEY": "x", "HWGRPO_BACKEND": "rocm"}
    kept = tier0(tmp_path, tmp_path, environ).variables
    assert kept == {"HIP_VISIBLE_DEVICES": "0", "RANK": "3", "HWGRPO_BACKEND": "rocm"}


def test_facts_of_both_tiers_are_json(this_host):
    assert json.loads(json.dumps(this_host.to_json()))["torch"]["version"] == torch.__version__


def ask(environ, timeout=60.0):
    return gather_tier1(Facts(), environ, BACKENDS, timeout)


def child_environ(*folders: Path, **variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **variables}


def fake_torch(folder: Path, text: str) -> Path:
    write(folder / "torch" / "__init__.py", text)
    return folder


def test_tier_1_reports_the_torch_of_this_machine(this_host):
    assert this_host.torch is not None
    assert this_host.torch.imported
    assert this_host.torch_version == torch.__version__
    assert this_host.torch_build == ("rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu")
    assert this_host.torch.devices["cuda"].available == torch.cuda.is_available()
    assert this_host.torch.devices["cuda"].count == torch.cuda.device_count()


def test_tier_1_names_the_root_cause_of_a_broken_vendor_plug_in(tmp_path):
    """The real torch beside a torch_npu whose libraries are missing, as without CANN."""
    install(tmp_path, "torch-npu", "2.13.0", "[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    write(tmp_path / "torch_npu" / "__init__.py", "raise ImportError('libhccl.so: cannot open shared object file')\n")
    facts = ask(child_environ(tmp_path)).torch
    assert facts is not None
    assert not facts.imported
    assert facts.without_plugins
    assert facts.version == torch.__version__
    assert "Failed to load the backend extension" in facts.errors[0]
    assert facts.errors[-1] == "ImportError: libhccl.so: cannot open shared object file"
    assert facts.plugins["torch_npu"] == ("ImportError: libhccl.so: cannot open shared object file",)


def test_tier_1_keeps_the_chain_of_exceptions_of_a_broken_torch(tmp_path):
    text = "try:\n    open('/nowhere')\nexcept OSError as e:\n    raise ImportError('torch is damaged') from e\n"
    facts = ask(child_environ(fake_torch(tmp_path, text))).torch
    assert facts is not None
    assert (facts.imported, facts.without_plugins) == (False, False)
    assert facts.errors[0] == "ImportError: torch is damaged"
    assert facts.errors[-1].startswith("FileNotFoundError")


def test_tier_1_survives_a_torch_that_kills_its_process(tmp_path):
    text = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    facts = ask(child_environ(fake_torch(tmp_path, text))).torch
    assert facts is not None
    assert not facts.imported
    assert "SIGSEGV" in facts.errors[0]


def test_tier_1_gives_up_on_a_torch_that_hangs_and_leaves_no_process_behind(tmp_path):
    text = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    facts = ask(child_environ(fake_torch(tmp_path, text), TORCH_DEVICE_BACKEND_AUTOLOAD="0"), timeout=2.0).torch
    assert facts is not None
    assert "more than 2 seconds" in facts.errors[0]
    assert facts.timed_out
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        try:
            os.kill(pid, signal.SIG_DFL)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the hanging child is still there")


def test_a_driver_that_hangs_is_told_from_a_torch_that_does_not_import(tmp_path):
    text = (
        "import time, types\n__version__ = '2.13.0'\nversion = types.SimpleNamespace(cuda='13.0', hip=None)\n"
        "def get_device_module(name):\n    time.sleep(600)\n"
    )
    facts = ask(child_environ(fake_torch(tmp_path, text)), timeout=4.0)
    assert facts.torch is not None
    assert (facts.torch.imported, facts.torch_build, facts.torch.timed_out) == (True, "cuda", False)
    problem = facts.torch.devices["cuda"].problem
    assert problem == "looking at the devices did not end well: it took more than 4 seconds"


def test_tier_1_reports_an_is_available_that_raises_and_a_warning_that_explains(tmp_path):
    text = """
import sys, types, warnings
__version__ = "2.13.0"
version = types.SimpleNamespace(cuda="13.0", hip=None)
print("a chatty plug-in", end="")
class _cuda:
    @staticmethod
    def is_available():
        warnings.warn("The NVIDIA driver on your system is too old\\nsecond line")
        return False
class _npu:
    @staticmethod
    def is_available():
        raise RuntimeError("driver not loaded")
def get_device_module(name):
    return {"cuda": _cuda, "npu": _npu}[name]
"""
    facts = ask(child_environ(fake_torch(tmp_path, text))).torch
    assert facts is not None
    assert facts.imported
    assert facts.cuda == "13.0"
    assert facts.devices["cuda"].problem == "The NVIDIA driver on your system is too old"
    assert facts.devices["npu"].problem == "RuntimeError: driver not loaded"
    assert not facts.devices["npu"].available


def test_tier_1_reads_names_and_architectures(tmp_path):
    text = """
import types
__version__ = "2.13.0+rocm7.1"
version = types.SimpleNamespace(cuda=None, hip="7.1")
class _cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    get_device_name = staticmethod(lambda i: f"AMD Instinct {i}")
    get_arch_list = staticmethod(lambda: ["gfx942"])
    get_device_properties = staticmethod(lambda i: types.SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-"))
def get_device_module(name):
    if name == "cuda":
        return _cuda
    raise RuntimeError(f"no {name} here")
"""
    facts = ask(child_environ(fake_torch(tmp_path, text)))
    assert facts.torch is not None
    device = facts.torch.devices["cuda"]
    assert (device.available, device.count, device.archs, device.built_for) == (True, 2, ("gfx942",) * 2, ("gfx942",))
    assert device.names == ("AMD Instinct 0", "AMD Instinct 1")
    assert facts.torch_build == "rocm"


def test_tier_1_is_asked_once_for_one_environment(monkeypatch):
    asked = []
    monkeypatch.setattr(tier1, "_cache", {})
    monkeypatch.setattr(tier1, "_ask", lambda *_: asked.append(1) or TorchFacts(imported=True))
    assert ask({"HOME": "/a"}).torch is ask({"HOME": "/a"}).torch
    assert len(asked) == 1
    ask({"HOME": "/a", "CUDA_VISIBLE_DEVICES": "7"})
    assert len(asked) == 2
