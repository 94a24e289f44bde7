"""Which backend each kind of host gets. Facts in, decision out: no device, no torch."""

import dataclasses

import pytest
from hwgrpo_backends import cuda, registry
from hwgrpo_backends.backend import Verdict
from hwgrpo_backends.decide import decide
from hwgrpo_backends.facts import Facts, TorchDevice, TorchFacts

BUILTIN = {name: registry.get(name) for name in registry.BUILTIN}
NVIDIA = ("nvidia0", "nvidia1")
AMD = ("dri/renderD128", "dri/renderD129", "kfd")
H100 = TorchDevice(
    available=True, count=2, names=("NVIDIA H100",) * 2, archs=("sm_90",) * 2, built_for=("sm_80", "sm_90")
)
NPU = TorchDevice(available=True, count=8, names=("Ascend910B1",) * 8)
NO_CANN = "ImportError: libhccl.so: cannot open shared object file: No such file or directory"
NO_DEVICES = {"cuda": TorchDevice(), "npu": TorchDevice()}


def host(build: str | None = "cpu", *, npu=None, tier1=None, **fields):
    """Facts of a host with torch 2.13.0 of a build, and torch-npu of a version."""
    version = None if build is None else "2.13.0" if build == "cuda" else f"2.13.0+{build}"
    distributions = {} if npu is None else {"torch-npu": npu}
    plugins = () if npu is None else ("torch_npu",)
    return Facts(
        torch_version=version, torch_build=build, distributions=distributions, torch_plugins=plugins, torch=tier1,
        **fields,
    )  # fmt: skip


def saw(build="cpu", **devices):
    """Tier 1 of a torch that imports and sees the given devices."""
    cuda, hip = {"cuda": ("13.0", None), "rocm": (None, "7.1")}.get(build, (None, None))
    return TorchFacts(imported=True, version="2.13.0", cuda=cuda, hip=hip, devices={**NO_DEVICES, **devices})


BROKEN_PLUGIN = TorchFacts(
    imported=False,
    without_plugins=True,
    errors=("RuntimeError: Failed to load the backend extension: torch_npu", NO_CANN),
    version="2.13.0",
    plugins={"torch_npu": (NO_CANN,)},
    devices=NO_DEVICES,
)

# What the host is, what auto selects (None: refused), and words that the warnings or the error must hold.
HOSTS = {
    "nothing but a CPU": (host(), "cpu", []),
    "nothing but a CPU, tier 1": (host(tier1=saw()), "cpu", []),
    "the default CUDA wheel on a laptop without a GPU": (
        host("cuda", tier1=saw("cuda")), "cpu", ["cuda is not used: no sign of an NVIDIA GPU", "are for one"]),
    "the default CUDA wheel in a pod that asked for no GPU": (
        host("cuda", tier1=saw("cuda"), driver_files=("/proc/driver/nvidia/version",)), None,
        ["/proc/driver/nvidia/version", "--gpus all", "backend.name=cpu"]),
    "a GPU whose node torch makes when it opens it": (
        host("cuda", tier1=saw("cuda", cuda=H100), driver_files=("/proc/driver/nvidia/version",)), "cuda", []),
    "the driver of GPUs under a CPU build of torch": (
        host("cpu", tier1=saw(), driver_files=("/proc/driver/nvidia/version",)), "cpu", []),
    "a pod that asked for no NPU, with torch-npu for another torch": (
        host(npu="2.10.0", driver_files=("/dev/davinci_manager",)), None, ["/dev/davinci_manager", "does not fit"]),
    "AMD GPUs whose render nodes this user may not open": (
        host("rocm", device_nodes=AMD, no_access=AMD[:2], kfd_gpus=2), None, ["may not open /dev/dri/renderD128"]),
    "AMD GPUs without their render nodes": (
        host("rocm", device_nodes=("kfd",), kfd_gpus=2), None, ["no /dev/dri/renderD", "--device=/dev/dri"]),
    "two NVIDIA GPUs, not opened yet": (host("cuda", device_nodes=NVIDIA), "cuda", []),
    "two NVIDIA GPUs, no nvidia-smi anywhere": (
        host("cuda", device_nodes=NVIDIA, tier1=saw("cuda", cuda=H100)), "cuda", []),
    "a GPU without device nodes, as under WSL": (host("cuda", tier1=saw("cuda", cuda=H100)), "cuda", []),
    "NVIDIA GPUs under a CPU build of torch": (
        host("cpu", device_nodes=NVIDIA, tier1=saw()), "cpu", ["cuda is not used", "install a CUDA build"]),
    "NVIDIA GPUs that torch cannot use": (
        host("cuda", device_nodes=NVIDIA, nvidia_driver="470.1",
             tier1=saw("cuda", cuda=TorchDevice(problem="The NVIDIA driver on your system is too old"))),
        None, ["driver on your system is too old", "470.1", "CUDA 13.0", "HWGRPO_BACKEND=cpu"]),
    "GPUs that this torch has no kernels for": (
        host("cuda", device_nodes=NVIDIA, tier1=saw(
            "cuda", cuda=dataclasses.replace(H100, archs=("sm_61", "sm_61"), built_for=("sm_75", "compute_120")))),
        None, ["no kernels for sm_61"]),
    "GPUs hidden on purpose": (
        host("cuda", device_nodes=NVIDIA, variables={"CUDA_VISIBLE_DEVICES": ""}, tier1=saw("cuda")),
        "cpu", ["CUDA_VISIBLE_DEVICES='' hides every device"]),
    "GPUs this user may not open": (
        host("rocm", device_nodes=("kfd",), no_access=("kfd",), kfd_gpus=2, tier1=saw("rocm")),
        None, ["may not open /dev/kfd", "render"]),
    "an NVIDIA GPU and an integrated AMD one": (
        host("cuda", device_nodes=("kfd", *NVIDIA), kfd_gpus=1, tier1=saw("cuda", cuda=H100)), "cuda", []),
    "an integrated AMD GPU under a CPU build": (
        host("cpu", device_nodes=("kfd",), kfd_gpus=1), "cpu", ["rocm is not used", "install a ROCm build"]),
    "the amdkfd driver without a GPU": (
        host("rocm", device_nodes=("kfd",), kfd_gpus=0, driver_files=("/sys/class/kfd/kfd",)), "cpu",
        ["rocm is not used: no sign of an AMD GPU"]),
    "AMD GPUs, which torch calls cuda": (
        host("rocm", device_nodes=("kfd",), kfd_gpus=8, tier1=saw("rocm", cuda=TorchDevice(
            available=True, count=8, names=("AMD Instinct MI300X",) * 8, archs=("gfx942",) * 8,
            built_for=("gfx90a", "gfx942")))), "rocm", []),
    "an AMD GPU that this torch has no kernels for": (
        host("rocm", device_nodes=("kfd",), kfd_gpus=1, tier1=saw("rocm", cuda=TorchDevice(
            available=True, count=1, names=("AMD Radeon",), archs=("gfx1036",), built_for=("gfx942",)))),
        None, ["no kernels for gfx1036"]),
    "eight NPUs, not opened yet": (
        host(npu="2.13.0", device_nodes=tuple(f"davinci{i}" for i in range(8))), "npu", []),
    "eight NPUs": (host(npu="2.13.0.post4", device_nodes=("davinci0",), tier1=saw(npu=NPU)), "npu", []),
    "an NPU simulated without device nodes": (host(npu="2.13.0", tier1=saw(npu=NPU)), "npu", []),
    "torch-npu importable, no NPU": (
        host(npu="2.13.0", tier1=saw()), "cpu", ["npu is not used: no sign of an Ascend NPU"]),
    "torch-npu whose is_available raises, no NPU": (
        host(npu="2.13.0", tier1=saw(npu=TorchDevice(problem="RuntimeError: driver not found"))), "cpu",
        ["npu is not used: no sign of an Ascend NPU"]),
    "torch-npu importable, no NPU, working NVIDIA GPU": (
        host("cuda", npu="2.13.0", device_nodes=NVIDIA, tier1=saw("cuda", cuda=H100)), "cuda", []),
    "transfer_to_npu makes torch.cuda answer on an NPU": (
        host(npu="2.13.0", device_nodes=("davinci0",), tier1=saw(cuda=NPU, npu=NPU)), "npu", []),
    "torch-npu without CANN breaks import torch, NPU there": (
        host(npu="2.13.0", device_nodes=("davinci0",), tier1=BROKEN_PLUGIN), None, ["libhccl.so", "set_env.sh"]),
    "torch-npu without CANN breaks import torch, no NPU": (
        host(npu="2.13.0", tier1=BROKEN_PLUGIN), None, ["libhccl.so", "pip uninstall torch-npu"]),
    "torch-npu without CANN breaks import torch beside a GPU": (
        host("cuda", npu="2.13.0", device_nodes=NVIDIA, tier1=dataclasses.replace(BROKEN_PLUGIN, cuda="13.0")),
        None, ["cuda: an NVIDIA GPU is here", "pip uninstall torch-npu"]),
    "torch-npu beside a CUDA build of torch, NPU there": (
        host("cuda", npu="2.13.0", device_nodes=("davinci0",)), None, ["torch-npu refuses", "CPU build of torch"]),
    "torch-npu for another torch": (
        host(npu="2.10.0", device_nodes=("davinci0",)), None, ["torch-npu 2.10.0 does not fit torch 2.13.0+cpu"]),
    "an NPU without torch-npu": (host(device_nodes=("davinci0",)), "cpu", ["npu is not used", "torch-npu"]),
    "vllm-ascend installed beside a GPU": (
        dataclasses.replace(host("cuda", device_nodes=NVIDIA), distributions={"vllm-ascend": "0.23.0"}), "cuda", []),
    "torch not installed": (host(None), None, ["torch is not installed", "scripts/setup.sh"]),
    "torch itself broken": (
        host(tier1=TorchFacts(imported=False, errors=("ImportError: libtorch.so: bad",))), None, ["libtorch.so: bad"]),
    "a worker without a device of its own": (
        host(variables={"HWGRPO_BACKEND_SELECTED": "cuda", "RAY_JOB_ID": "1"}), "cuda", []),
    "HWGRPO_BACKEND asks for the CPU beside a GPU": (
        host("cuda", device_nodes=NVIDIA, variables={"HWGRPO_BACKEND": "cpu"}), "cpu", []),
    "HWGRPO_BACKEND asks for what is not there": (
        host(variables={"HWGRPO_BACKEND": "npu"}), None,
        ["HWGRPO_BACKEND='npu'", "torch-npu is not installed", "Fix: choose auto"]),
    "the same list in two variables, which hides every GPU": (
        host("rocm", device_nodes=AMD, kfd_gpus=8, tier1=saw("rocm"),
             variables={"HIP_VISIBLE_DEVICES": "4,5", "ROCR_VISIBLE_DEVICES": "4,5"}),
        None, ["ROCR_VISIBLE_DEVICES='4,5' and HIP_VISIBLE_DEVICES='4,5' leave none of 8 devices", "Fix: unset"]),
    "the same list in two variables, before torch was asked": (
        host("rocm", device_nodes=AMD, kfd_gpus=8,
             variables={"CUDA_VISIBLE_DEVICES": "4,5", "ROCR_VISIBLE_DEVICES": "4,5"}),
        None, ["ROCR_VISIBLE_DEVICES='4,5' and CUDA_VISIBLE_DEVICES='4,5' leave none of 8 devices"]),
    "a number that no NPU has": (
        host(npu="2.13.0", device_nodes=("davinci0", "davinci1"), variables={"ASCEND_RT_VISIBLE_DEVICES": "9"}),
        None, ["ASCEND_RT_VISIBLE_DEVICES='9' leaves none of 2 devices", "numbered from 0 to 1", "Fix: unset"]),
    "a variable that may be why torch sees no GPU": (
        host("cuda", device_nodes=NVIDIA, tier1=saw("cuda"), variables={"CUDA_VISIBLE_DEVICES": "GPU-12345678"}),
        None, ["CUDA_VISIBLE_DEVICES='GPU-12345678'", "torch cannot use it"]),
    "a variable that names a GPU by its identity": (
        host("cuda", device_nodes=NVIDIA, variables={"CUDA_VISIBLE_DEVICES": "GPU-12345678"}), "cuda", []),
    "an empty variable where devices have no nodes": (
        host("cuda", tier1=saw("cuda"), variables={"CUDA_VISIBLE_DEVICES": ""}), "cpu",
        ["CUDA_VISIBLE_DEVICES='' hides every device"]),
    "NPUs of which some are closed to this user": (
        host(npu="2.13.0", device_nodes=("davinci0", "davinci1"), no_access=("davinci1",),
             tier1=saw(npu=TorchDevice(problem="RuntimeError: open device 1 failed"))),
        None, ["open device 1 failed", "may not open /dev/davinci1", "HwHiAiUser"]),
    "an old AMD GPU under generic targets": (
        host("rocm", device_nodes=AMD, kfd_gpus=1, tier1=saw("rocm", cuda=TorchDevice(
            available=True, count=1, names=("Radeon RX 580",), archs=("gfx803",),
            built_for=("gfx9-generic", "gfx942")))), None, ["no kernels for gfx803"]),
    "an AMD GPU of a generic target's family": (
        host("rocm", device_nodes=AMD, kfd_gpus=1, tier1=saw("rocm", cuda=TorchDevice(
            available=True, count=1, names=("Radeon VII",), archs=("gfx906",), built_for=("gfx9-generic",)))),
        "rocm", []),
    "Intel's build of torch": (host("xpu"), "cpu", ["built for Intel GPUs (xpu)", "no backend"]),
    "Apple's processors": (host(system="darwin", machine="arm64"), "cpu", ["Apple GPU (mps)", "no backend"]),
    "two visibility variables on ROCm, rightly nested": (
        host("rocm", device_nodes=AMD, kfd_gpus=2,
             variables={"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1"}),
        "rocm", []),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTS)
def test_auto_selects_the_right_backend_on(name):
    facts, selected, words = HOSTS[name]
    decision = decide(facts, "auto", BUILTIN)
    assert decision.selected == selected, decision
    assert (decision.error is None) == (selected is not None)
    said = decision.error if selected is None else "\n".join(decision.warnings)
    assert said is not None
    assert bool(said) == bool(words), said
    for word in words:
        assert word in said


def test_a_cpu_only_worker_is_told_nothing():
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HWGRPO_BACKEND_SELECTED": "cuda"}
    decision = decide(host("cuda", device_nodes=NVIDIA, variables=hidden, tier1=saw("cuda")), "auto", BUILTIN)
    assert (decision.selected, decision.warnings, decision.inherited) == ("cuda", (), True)


def test_a_worker_that_asks_for_another_backend_is_checked_again():
    facts = host(variables={"HWGRPO_BACKEND_SELECTED": "cpu"})
    assert decide(facts, "cpu", BUILTIN).inherited
    decision = decide(facts, "cuda", BUILTIN)
    assert decision.selected is None
    assert not decision.inherited


def test_an_inherited_name_that_does_not_exist_is_refused():
    decision = decide(host(variables={"HWGRPO_BACKEND_SELECTED": "cda"}), "auto", BUILTIN)
    assert decision.selected is None
    assert "HWGRPO_BACKEND_SELECTED='cda'" in str(decision.error)


def test_an_argument_beats_the_variable():
    facts = host("cuda", device_nodes=NVIDIA, variables={"HWGRPO_BACKEND": "npu"})
    assert decide(facts, "cuda", BUILTIN).selected == "cuda"


def test_an_explicit_backend_that_cannot_work_is_an_error_with_reason_and_fix_and_never_another_backend():
    decision = decide(host(device_nodes=NVIDIA, tier1=saw()), "cuda", BUILTIN)
    assert decision.selected is None
    for word in ("backend='cuda'", "not a CUDA build", "Fix: install a CUDA build"):
        assert word in str(decision.error)


def test_rocm_is_not_cuda():
    decision = decide(host("rocm", device_nodes=("kfd",), kfd_gpus=8), "cuda", BUILTIN)
    assert "not a CUDA build" in str(decision.error)


@pytest.mark.parametrize(("typo", "meant"), [("cudda", "cuda"), ("CUDA", "cuda"), ("roc", "rocm"), ("nppu", "npu")])
def test_a_typo_is_refused_with_the_nearest_name(typo, meant):
    decision = decide(host(), typo, BUILTIN)
    assert decision.selected is None
    assert f"Did you mean {meant!r}?" in str(decision.error)
    assert "auto, cpu, cuda, npu, rocm" in str(decision.error)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpu", ["cuda", "rocm", "use cuda"]),
        ("nvidia", ["Did you mean 'cuda'?"]),
        ("amd", ["Did you mean 'rocm'?"]),
        ("ascend", ["Did you mean 'npu'?"]),
        ("xpu", ["Intel GPUs", "no backend"]),
        ("mps", ["Apple", "no backend"]),
    ],
)
def test_a_name_that_people_use_for_devices_leads_to_the_backends_of_those(name, words):
    error = decide(host(), name, BUILTIN).error
    assert error is not None
    for word in words:
        assert word in error
    assert "'npu'" not in error or name == "ascend", error


def test_closed_devices_are_not_counted():
    facts = host(npu="2.13.0", device_nodes=("davinci0", "davinci1", "davinci2"), no_access=("davinci1",))
    verdict = decide(facts, "auto", BUILTIN).verdicts["npu"]
    assert (verdict.state, verdict.devices) == ("unverified", 2)
    assert "/dev/davinci1" in verdict.reason


@pytest.mark.parametrize(
    ("arch", "built_for", "runs"),
    [
        ("sm_100", ("sm_100a",), True),
        ("sm_103", ("sm_100a",), False),
        ("sm_103", ("sm_100f",), True),
        ("sm_120", ("sm_100f",), False),
        ("sm_121", ("compute_120a",), False),
        ("sm_121", ("compute_120",), True),
        ("sm_90", ("sm_80", "sm_90a"), True),
        ("sm_89", ("sm_80",), True),
    ],
)
def test_code_for_one_chip_alone_runs_on_no_later_one(arch, built_for, runs):
    assert cuda.runs_on(arch, built_for) is runs


def vendor(name, verdict):
    return dataclasses.replace(BUILTIN["npu"], name=name, device_type=name, probe=lambda facts: verdict)


def test_two_usable_accelerators_are_an_error_naming_both_and_the_variable_that_chooses():
    usable = Verdict(state="ok", reason="1 x Chip", devices=1, claimed=True, hardware="present")
    backends = BUILTIN | {"chipa": vendor("chipa", usable), "chipb": vendor("chipb", usable)}
    decision = decide(host(), "auto", backends)
    assert decision.selected is None
    for word in ("chipa", "chipb", "HWGRPO_BACKEND=chipa or HWGRPO_BACKEND=chipb"):
        assert word in str(decision.error)
    assert decide(host(), "chipb", backends).selected == "chipb"


def test_a_broken_claimed_accelerator_beside_a_working_one_is_a_warning():
    broken = Verdict(state="unusable", reason="no firmware", fix="flash it", claimed=True, hardware="present")
    facts = host("cuda", device_nodes=NVIDIA, tier1=saw("cuda", cuda=H100))
    decision = decide(facts, "auto", BUILTIN | {"chip": vendor("chip", broken)})
    assert decision.selected == "cuda"
    assert decision.warnings == ("chip is not used: no firmware. Fix: flash it",)


def test_a_plug_in_that_is_installed_is_not_thereby_chosen():
    absent = Verdict(state="unusable", reason="no device")
    assert decide(host(), "auto", BUILTIN | {"chip": vendor("chip", absent)}).selected == "cpu"


def test_a_probe_that_raises_costs_only_its_own_backend():
    def explode(facts):
        raise KeyError("ASCEND_HOME_PATH")

    backends = BUILTIN | {"chip": dataclasses.replace(BUILTIN["npu"], name="chip", probe=explode)}
    decision = decide(host(), "auto", backends)
    assert decision.selected == "cpu"
    assert "KeyError" in decision.verdicts["chip"].reason


def test_a_plug_in_that_did_not_load_is_an_error_only_when_asked_for():
    problems = {"chip": "plug-in chip.backend does not load: ImportError: libchip.so"}
    assert decide(host(), "auto", BUILTIN, problems).selected == "cpu"
    assert "libchip.so" in str(decide(host(), "chip", BUILTIN, problems).error)


def test_visible_devices_limit_the_count_that_tier_0_gives():
    facts = host("cuda", device_nodes=("nvidia0", "nvidia1", "nvidia2"), variables={"CUDA_VISIBLE_DEVICES": "0,2"})
    assert decide(facts, "auto", BUILTIN).verdicts["cuda"].devices == 2


def test_deciding_twice_gives_the_same_answer():
    for facts, _, _ in HOSTS.values():
        assert decide(facts, "auto", BUILTIN) == decide(facts, "auto", BUILTIN)
