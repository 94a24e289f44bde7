"""What is said of each kind of host: facts in, lines out. No device, no torch."""

import dataclasses
from dataclasses import replace

import pytest
from hwgrpo_backends.facts import TorchDevice, TorchFacts

from hwgrpo.doctor import checks
from tests.support.devices import hosts
from tests.support.devices.hosts import GIB, NO_CANN, SOUND, diagnosis

NOTHING = TorchDevice()

# The host; what auto selects (None: refused); lines that must be there as (state, what, words of found and fix);
# whether the exit status is 1.
HOSTS = {
    "NVIDIA": (hosts.cuda(), "cuda", [
        ("ok", "NVIDIA driver", ["580.95.05", "needs 580 or newer", "newer is fine"]),
        ("ok", "NVIDIA nodes", ["2: /dev/nvidia0, /dev/nvidia1"]),
        ("ok", "torch", ["2.13.0, built for cuda 13.0"])], False),
    "NVIDIA, driver newer than torch's CUDA": (hosts.cuda(toolkit="12.8"), "cuda", [
        ("ok", "NVIDIA driver", ["580.95.05", "CUDA 12.8 needs 525"])], False),
    "NVIDIA, driver too old": (
        hosts.cuda("570.86.10", device=TorchDevice(problem="The NVIDIA driver on your system is too old")), None, [
            ("FAIL", "NVIDIA driver", ["570.86.10 is too old", "CUDA 13.0 needs 580 or newer", "update the driver"]),
            ("FAIL", "backend", ["driver on your system is too old"])], True),
    "NVIDIA, driver too old, with forward-compatible libraries": (hosts.cuda("570.86.10"), "cuda", [
        ("ok", "NVIDIA driver", ["570.86.10 is older than", "torch works with it"])], False),
    "ROCm, two variables that hide every GPU": (
        hosts.rocm(device=NOTHING, variables={"HIP_VISIBLE_DEVICES": "4,5", "ROCR_VISIBLE_DEVICES": "4,5"}), None, [
            ("FAIL", "visible devices", ["leave none of 8 devices", "unset"])], True),
    "Ascend, a number that no NPU has": (
        hosts.npu(tier1=hosts.saw(), variables={"ASCEND_HOME_PATH": "/x", "ASCEND_RT_VISIBLE_DEVICES": "9"}), None, [
            ("FAIL", "visible devices", ["ASCEND_RT_VISIBLE_DEVICES='9'", "unset"])], True),
    "CUDA build, no driver, no GPU": (hosts.cuda(None, device=NOTHING, nodes=()), "cpu", [
        ("warn", "NVIDIA driver", ["none found", "install the NVIDIA driver (580 or newer)"]),
        ("warn", "NVIDIA nodes", ["no /dev/nvidia"])], False),
    "CUDA build in a container started without GPUs": (
        hosts.cuda(device=NOTHING, nodes=(), container="docker"), None, [
            ("FAIL", "NVIDIA nodes", ["although the kernel has the driver", "--gpus all"]),
            ("FAIL", "backend", ["--gpus all", "backend.name=cpu"])], True),
    "ROCm in a container without render nodes": (
        hosts.rocm(device=NOTHING, nodes=("kfd",), container="docker"), None, [
            ("FAIL", "AMD render nodes", ["no /dev/dri/renderD*", "--device=/dev/dri"])], True),
    "CUDA under WSL": (hosts.cuda(None, nodes=(), wsl=True, wsl_gpu=True), "cuda", [
        ("ok", "NVIDIA driver", ["/dev/dxg"]), ("ok", "machine", ["under WSL"])], False),
    "CUDA under WSL without /dev/dxg": (hosts.cuda(None, device=NOTHING, nodes=(), wsl=True), "cpu", [
        ("warn", "NVIDIA driver", ["WSL without /dev/dxg", "wsl --update"])], False),
    "CUDA, both tritons": (
        hosts.cuda(distributions={"torch": "2.13.0", "triton": "3.7.1", "triton-ascend": "3.2.2",
                                  "transformers": "5.19.0", "datasets": "5.2.0", "peft": "0.21.2"}), "cuda", [
            ("FAIL", "triton", ["triton 3.7.1 and triton-ascend 3.2.2", "then install triton"])], True),
    "CUDA, all hidden": (hosts.cuda(device=NOTHING, variables={"CUDA_VISIBLE_DEVICES": ""}), "cpu", [
        ("warn", "visible devices", ["CUDA_VISIBLE_DEVICES='' hides every cuda device", "unset"])], False),
    "CUDA, some hidden": (hosts.cuda(variables={"CUDA_VISIBLE_DEVICES": "1"}), "cuda", [
        ("ok", "visible devices", ["CUDA_VISIBLE_DEVICES='1'"])], False),
    "CUDA, vllm-ascend installed": (
        hosts.cuda(distributions={**hosts.cuda().distributions, "vllm-ascend": "0.23.0"}), "cuda", [
            ("warn", "vllm-ascend", ["vLLM will take this host for one with NPUs", "pip uninstall vllm-ascend"])],
        False),
    "NVIDIA GPUs under a CPU build of torch": (hosts.cpu(device_nodes=("nvidia0",), nvidia_driver="580.95"), "cpu", [
        ("warn", "torch for the device", ["not a CUDA build", "install a CUDA build"]),
        ("ok", "NVIDIA driver", ["580.95"])], False),
    "ROCm": (hosts.rocm(), "rocm", [
        ("ok", "AMD nodes", ["1: /dev/kfd"]), ("ok", "AMD topology", ["8 GPU(s)"])], False),
    "ROCm, not allowed": (hosts.rocm(device=NOTHING, no_access=("kfd",)), None, [
        ("FAIL", "AMD nodes", ["may not open /dev/kfd", "render"])], True),
    "ROCm in a container without nodes": (
        hosts.rocm(device=NOTHING, nodes=(), gpus=None, container="kubernetes"), "cpu", [
            ("warn", "AMD nodes", ["no /dev/kfd in this container (kubernetes)", "--device=/dev/kfd"])], False),
    "ROCm, pretending another chip": (hosts.rocm(variables={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}), "rocm", [
        ("warn", "HSA_OVERRIDE_GFX_VERSION", ["11.0.0", "unset it"])], False),
    "ROCm, two variables that are rightly nested": (
        hosts.rocm(variables={"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1"}), "rocm", [
            ("ok", "visible devices", ["ROCR_VISIBLE_DEVICES='1' and HIP_VISIBLE_DEVICES='0'"])], False),
    "ROCm, two variables of which one names devices that the other leaves out": (
        hosts.rocm(variables={"HIP_VISIBLE_DEVICES": "0,4", "ROCR_VISIBLE_DEVICES": "4,5"}), "rocm", [
            ("warn", "visible devices", ["leave 1 of the 2 devices that HIP_VISIBLE_DEVICES names",
                                         "unset HIP_VISIBLE_DEVICES, or name numbers from 0 to 1"])], False),
    "Ascend": (hosts.npu(), "npu", [
        ("ok", "Ascend nodes", ["8: /dev/davinci0", "..."]), ("ok", "Ascend driver", ["25.2.0"]),
        ("ok", "CANN", ["9.1.0 in /usr/local/Ascend/cann"]),
        ("ok", "entry points", ["torch.backends: torch_npu (torch-npu)"])], False),
    "Ascend, CANN not sourced": (hosts.npu(tier1=hosts.BROKEN_PLUGIN, home=None), None, [
        ("FAIL", "CANN", ["installed, but its environment is not sourced",
                          "source /usr/local/Ascend/ascend-toolkit/set_env.sh"]),
        ("FAIL", "import torch", ["Failed to load the backend extension: torch_npu <- ImportError: libhccl.so",
                                  "fix: source /usr/local/Ascend/ascend-toolkit/set_env.sh, or pip uninstall torch-npu",
                                  "TORCH_DEVICE_BACKEND_AUTOLOAD=0 does not help"])], True),
    "Ascend, CANN sourced and torch-npu made for another": (hosts.npu(tier1=hosts.BROKEN_PLUGIN), None, [
        ("FAIL", "import torch", ["fix: see that the Ascend driver, CANN and torch-npu match, or pip uninstall"])],
        True),
    "torch-npu without its loading": (
        hosts.npu(tier1=dataclasses.replace(hosts.BROKEN_PLUGIN, imported=True, errors=()), home=None), None, [
            ("FAIL", "import torch_npu", [NO_CANN, "fix: source /usr/local/Ascend/ascend-toolkit/set_env.sh"])], True),
    "another plug-in of torch is broken": (hosts.cpu(
        torch=TorchFacts(imported=False, without_plugins=True, errors=("RuntimeError: chip",), version="2.13.0"),
        torch_plugins=("chip",), entry_points={"torch.backends": ("chip (torch_chip)",)}), None, [
        ("FAIL", "import torch", ["fix: repair it, or pip uninstall torch-chip",
                                  "AUTOLOAD=0 makes `import torch` work"])], True),
    "torch-npu without CANN, no NPU": (
        hosts.npu(tier1=hosts.BROKEN_PLUGIN, home=None, nodes=(), cann_script=None), None, [
            ("FAIL", "CANN", ["no ASCEND_HOME_PATH", "pip uninstall torch-npu"]),
            ("FAIL", "import torch", [NO_CANN])], True),
    "Ascend, driver folder not mounted": (hosts.npu(npu_driver=None), "npu", [
        ("warn", "Ascend driver", ["version.info", "mount /usr/local/Ascend/driver"])], False),
    "Ascend container without nodes": (
        hosts.npu(tier1=hosts.saw(), nodes=(), npu_driver="25.2.0", container="docker"), "cpu", [
            ("FAIL", "Ascend nodes", ["although the kernel has the driver", "--device=/dev/davinci0"])], False),
    "NPUs beside GPUs whose torch is a CUDA build": (
        dataclasses.replace(hosts.npu(tier1=hosts.saw("13.0", cuda=hosts.H100, npu=hosts.NPU)), torch_build="cuda",
                            device_nodes=(*hosts.NPU_NODES, *hosts.NVIDIA_NODES)), "cuda", [
            ("warn", "backend", ["npu is not used", "torch-npu refuses torch 2.13.0+cpu, which is built for cuda"])],
        False),
    "torch damaged": (hosts.cpu(torch=TorchFacts(imported=False, errors=("ImportError: a", "OSError: b"))), None, [
        ("FAIL", "import torch", ["ImportError: a <- OSError: b", "AUTOLOAD=0 does not help"])], True),
    "torch not installed": (hosts.cpu(torch_version=None, torch_build=None, torch=None), None, [
        ("FAIL", "torch", ["not installed", "scripts/setup.sh"])], True),
    "plug-ins left out": (hosts.cpu(variables={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}), "cpu", [
        ("ok", "import torch", ["works, without its plug-ins"])], False),
    "in a job": (hosts.cpu(scheduler="slurm job 7, rank 0 of 4"), "cpu", [
        ("ok", "machine", ["started by slurm job 7, rank 0 of 4"])], False),
}  # fmt: skip


def holds(finding, state, what, words):
    return (
        finding.state == state
        and finding.what == what
        and all(w in f"{finding.found} fix: {finding.fix}" for w in words)
    )


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_gets_its_lines_its_backend_and_its_exit_status(name):
    facts, selected, lines, fails = HOSTS[name]
    report = diagnosis(facts)
    assert report.decision.selected == selected, report.decision
    for line in lines:
        assert any(holds(finding, *line) for finding in report.findings), (line, report.findings)
    assert bool(report.failures) == fails, report.failures


@pytest.mark.parametrize("error", ["it took more than 60 seconds", "it was ended by SIGKILL"])
def test_an_import_that_took_too_long_or_was_killed_gets_no_advice_on_plug_ins(error: str):
    torch = TorchFacts(imported=False, errors=(error,), timed_out="60" in error, version="2.13.0")
    [line] = [f for f in diagnosis(hosts.cpu(torch=torch)).findings if f.what == "import torch"]
    assert line.state == "FAIL"
    assert "AUTOLOAD" not in str(line.fix)


@pytest.mark.parametrize("facts", [hosts.cuda(), hosts.rocm(), hosts.npu(), hosts.cpu()])
def test_a_sound_host_has_nothing_to_repair(facts):
    assert [f for f in diagnosis(facts).findings if f.state != "ok"] == []


@pytest.mark.parametrize(
    "facts",
    [
        hosts.rocm(variables={"HIP_VISIBLE_DEVICES": "0,4", "ROCR_VISIBLE_DEVICES": "4,5"}),
        hosts.cpu(device_nodes=("nvidia0",), nvidia_driver="580.95"),
    ],
    ids=["two variables", "a GPU under a CPU build"],
)
def test_what_a_check_has_found_is_not_told_again_as_a_warning_of_the_decision(facts):
    report = diagnosis(facts)
    assert report.decision.warnings
    assert len([f for f in report.findings if f.state != "ok"]) == 1


def test_two_usable_accelerators_are_refused_and_both_are_named():
    facts = hosts.npu()
    backends = {**hosts.BUILTIN, "rocm": replace(hosts.BUILTIN["rocm"], probe=hosts.BUILTIN["npu"].probe)}
    decision = hosts.decide(facts, "auto", backends, {})
    report = hosts.assemble(checks.Subject(facts, SOUND, decision, backends, {}), {})
    assert report.decision.selected is None
    [line] = [f for f in report.findings if f.what == "backend"]
    assert line.state == "FAIL"
    assert "HWGRPO_BACKEND=npu or HWGRPO_BACKEND=rocm" in line.found
    assert report.failures == ("backend",)


def test_a_failure_of_another_backend_does_not_fail_the_chosen_one():
    facts = hosts.cuda(device=NOTHING, nodes=(), container="docker")
    assert diagnosis(facts, "cpu").failures == ()
    on_the_cpu = hosts.cpu(nvidia_driver="580.95.05", driver_files=facts.driver_files, container="docker")
    assert diagnosis(on_the_cpu).failures == ()
    assert "NVIDIA nodes" in diagnosis(facts, "cuda").failures


def test_a_family_without_a_sign_is_spoken_of_only_when_asked_for():
    told = {finding.what for finding in diagnosis(hosts.cpu()).findings}
    assert not {what for what in told if what.startswith(("NVIDIA", "AMD", "Ascend", "CANN"))}
    assert "CANN" in {finding.what for finding in diagnosis(hosts.cpu(), "npu").findings}


def test_a_broken_plug_in_is_a_line_and_fails_only_who_asks_for_it():
    problems = {"acme": "plug-in acme:BACKEND does not load: ImportError: libacme.so"}
    report = diagnosis(hosts.cpu(), problems=problems)
    assert any(holds(f, "FAIL", "plug-in acme", ["libacme.so", "repair or uninstall"]) for f in report.findings)
    assert report.failures == ()
    assert "plug-in acme" in diagnosis(hosts.cpu(), "acme", problems=problems).failures


HOST_LINES = {
    "old Python": ({"python": (3, 10, 2)}, "FAIL", "Python", ["3.10.2", "3.11 or newer"]),
    "small shm": ({"shm": 64 * 1024**2}, "warn", "/dev/shm", ["64 MiB", "enlarge it"]),
    "no room": ({"cache_free": 3 * GIB}, "warn", "cache folder", ["3.0 GiB free", "HF_HOME"]),
    "cache read-only": ({"cache_writable": False}, "warn", "cache folder", ["is not writable", "HF_HOME"]),
    "ASCII": ({"encoding": "ascii"}, "warn", "locale", ["ascii", "PYTHONUTF8=1"]),
    "an encoding nobody knows": ({"encoding": "x-none"}, "warn", "locale", ["x-none"]),
    "UTF-8 by another name": ({"encoding": "utf8"}, "ok", "locale", []),
    "few files": ({"open_files": 1024}, "warn", "ulimit -n", ["1024", "ulimit -n 65536"]),
    "a hub that is not contacted": ({"environment": {}}, "ok", "model hub", ["not contacted"]),
    "offline": ({"environment": {"HF_HUB_OFFLINE": "1"}}, "ok", "model hub", ["offline"]),
    "no compiler": ({"c_compiler": None}, "warn", "C compiler", ["no C compiler", "python3.12-dev"]),
    "no header": ({"python_header": None}, "warn", "C compiler", ["no Python.h", "python3.12-dev"]),
}


@pytest.mark.parametrize("name", HOST_LINES)
def test_the_machine_itself_is_checked(name):
    fields, *line = HOST_LINES[name]
    assert any(holds(f, *line) for f in diagnosis(hosts.cuda(), host=replace(SOUND, **fields)).findings)


def test_containers_are_told_how_to_get_more_shared_memory():
    report = diagnosis(hosts.cpu(container="docker"), host=replace(SOUND, shm=64 * 1024**2))
    assert any(holds(f, "warn", "/dev/shm", ["--shm-size"]) for f in report.findings)


def test_a_compiler_is_not_asked_for_where_no_kernel_needs_one():
    report = diagnosis(hosts.cpu(), host=replace(SOUND, c_compiler=None, python_header=None))
    assert [f.state for f in report.findings if f.what == "C compiler"] == ["ok"]


def test_a_check_that_raises_is_a_line_and_the_others_are_made(monkeypatch):
    def disk(subject):
        raise OSError("the disk is gone")

    monkeypatch.setattr(checks, "CHECKS", (disk, checks.python))
    findings = diagnosis(hosts.cpu()).findings
    assert holds(findings[0], "warn", "disk", ["OSError: the disk is gone"])
    assert holds(findings[1], "ok", "Python", ["3.12.4"])


def test_kernels_that_cannot_be_told_are_a_failure():
    report = diagnosis(hosts.cpu(), survey={"kernels": {"error": "ImportError: x"}, "attention": []})
    assert report.failures == ("kernels",)


def test_an_op_that_nothing_can_run_is_a_failure():
    ops = [{"op": "row_stats", "error": None}, {"op": "row_grad", "error": "HWGRPO_KERNELS: no such kernel"}]
    report = diagnosis(hosts.cpu(), survey={"kernels": {"plugins": [], "ops": ops}, "attention": []})
    assert report.failures == ("kernels of row_grad",)


def test_a_kernel_plug_in_that_fails_is_a_line():
    plugins = [{"name": "acme", "error": "ImportError: libacme.so"}, {"name": "fine", "error": None}]
    report = diagnosis(hosts.cpu(), survey={"kernels": {"plugins": plugins, "ops": []}, "attention": []})
    assert [f.what for f in report.findings if "libacme.so" in f.found] == ["kernel plug-in acme"]
    assert report.failures == ()
