"""Made-up hosts for the tests of the diagnosis: facts as both tiers would gather them."""

from hwgrpo_backends import registry
from hwgrpo_backends.decide import decide
from hwgrpo_backends.facts import Facts, TorchDevice, TorchFacts

from hwgrpo.doctor.checks import GIB, Subject
from hwgrpo.doctor.diagnosis import assemble
from hwgrpo.doctor.host_facts import HostFacts

BUILTIN = {name: registry.get(name) for name in registry.BUILTIN}
NO_CANN = "ImportError: libhccl.so: cannot open shared object file: No such file or directory"
H100 = TorchDevice(
    available=True, count=2, names=("NVIDIA H100",) * 2, archs=("sm_90",) * 2, built_for=("sm_80", "sm_90")
)
MI300 = TorchDevice(
    available=True, count=8, names=("AMD Instinct MI300X",) * 8, archs=("gfx942",) * 8, built_for=("gfx942",)
)
NPU = TorchDevice(available=True, count=8, names=("Ascend910B1",) * 8)
NVIDIA_NODES = ("nvidia0", "nvidia1")
NPU_NODES = tuple(f"davinci{i}" for i in range(8))
SOUND = HostFacts(
    python=(3, 12, 4), executable="/venv/bin/python", platform="Linux 6.8, x86_64", cores=64, c_compiler="gcc",
    python_header="/usr/include/python3.12", shm=64 * GIB, cache="/home/ada/.cache/huggingface/hub",
    cache_free=500 * GIB, open_files=65536,
)  # fmt: skip


def saw(toolkit=None, hip=False, **devices):
    """Tier 1 of a torch that imports and sees `devices`."""
    cuda, rocm = (None, toolkit) if hip else (toolkit, None)
    seen = {"cuda": TorchDevice(), "npu": TorchDevice(), **devices}
    return TorchFacts(imported=True, version="2.13.0", cuda=cuda, hip=rocm, devices=seen)


def cuda(driver="580.95.05", toolkit="13.0", device=H100, nodes=NVIDIA_NODES, **fields):
    packages = {"torch": "2.13.0", "triton": "3.7.1", "transformers": "5.19.0", "datasets": "5.2.0", "peft": "0.21.2"}
    return Facts(**{
        "torch_version": "2.13.0", "torch_build": "cuda", "torch_toolkit": toolkit, "nvidia_driver": driver,
        "device_nodes": nodes, "driver_files": ("/proc/driver/nvidia/version",) if driver else (),
        "distributions": packages, "torch": saw(toolkit, cuda=device), **fields,
    })  # fmt: skip


def rocm(device=MI300, nodes=("dri/renderD128", "kfd"), gpus=8, **fields):
    packages = {"torch": "2.13.0+rocm7.1", "transformers": "5.19.0", "datasets": "5.2.0", "peft": "0.21.2"}
    return Facts(**{
        "torch_version": "2.13.0+rocm7.1", "torch_build": "rocm", "torch_toolkit": "7.1", "device_nodes": nodes,
        "kfd_gpus": gpus, "distributions": packages, "torch": saw("7.1", hip=True, cuda=device), **fields,
    })  # fmt: skip


def npu(tier1=None, nodes=NPU_NODES, home="/usr/local/Ascend/cann", **fields):
    packages = {
        "torch": "2.13.0+cpu", "torch-npu": "2.13.0", "triton-ascend": "3.2.2", "transformers": "5.19.0",
        "datasets": "5.2.0", "peft": "0.21.2",
    }  # fmt: skip
    return Facts(**{
        "machine": "aarch64", "torch_version": "2.13.0+cpu", "torch_build": "cpu", "device_nodes": nodes,
        "npu_driver": "25.2.0" if nodes else None, "cann_version": "9.1.0" if home else None,
        "cann_script": "/usr/local/Ascend/ascend-toolkit/set_env.sh", "torch_plugins": ("torch_npu",),
        "entry_points": {"torch.backends": ("torch_npu (torch-npu)",)},
        "variables": {"ASCEND_HOME_PATH": home} if home else {}, "distributions": packages,
        "torch": saw(npu=NPU) if tier1 is None else tier1, **fields,
    })  # fmt: skip


def cpu(**fields):
    packages = {"torch": "2.13.0+cpu", "transformers": "5.19.0", "datasets": "5.2.0", "peft": "0.21.2"}
    return Facts(**{
        "torch_version": "2.13.0+cpu", "torch_build": "cpu", "distributions": packages, "torch": saw(), **fields
    })  # fmt: skip


BROKEN_PLUGIN = TorchFacts(
    imported=False,
    without_plugins=True,
    errors=("RuntimeError: Failed to load the backend extension: torch_npu", NO_CANN),
    version="2.13.0",
    plugins={"torch_npu": (NO_CANN,)},
    devices={"cuda": TorchDevice(), "npu": TorchDevice()},
)


def diagnosis(facts, requested="auto", host=SOUND, problems=None, survey=None, self_tests=None):
    """Return the report of a simulated host."""
    problems = problems or {}
    decision = decide(facts, requested, BUILTIN, problems)
    return assemble(Subject(facts, host, decision, BUILTIN, problems), survey or {}, self_tests)
