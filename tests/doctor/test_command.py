"""`hwgrpo doctor` in a process of its own, on this machine and with what can be broken, broken."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hwgrpo_backends import get

from hwgrpo.doctor.hardware import proven_on
from tests.support.devices.fake_hosts import FakeHost

ROOT = Path(__file__).parents[2]
RUN = """
import functools, os, sys
from hwgrpo.cli.main import main
from hwgrpo.doctor import diagnosis
diagnosis.diagnose = functools.partial(diagnosis.diagnose, root=os.environ.get("FAKE_ROOT", "/"))
code = main(["doctor", *sys.argv[1:]])
assert not {"torch", "transformers"} & sys.modules.keys(), "imported in the parent"
raise SystemExit(code)
"""
CLOSED = 'exec "$@" >&-'
MEETING = """
import sys, time
from pathlib import Path
me = Path(sys.argv[0]).stem
other = {"torch_probe": "survey_child", "survey_child": "torch_probe"}[me]
Path(__file__).with_name(me).touch()
for _ in range(600):
    if Path(__file__).with_name(other).exists():
        break
    time.sleep(0.1)
else:
    raise ImportError(f"{other} was not there")
"""
"""A torch that each of the two children imports only when the other one does, too."""


def doctor(*arguments, path=(), wrap=(), output=subprocess.PIPE, **variables):
    folders = [*path, *(ROOT / part for part in (".", "backends", "kernels"))]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HWGRPO_") and not k.endswith("VISIBLE_DEVICES")}
    environ = {**clean, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1", **variables}
    command = [*wrap, sys.executable, "-c", RUN, *arguments]
    return subprocess.run(command, env=environ, stdout=output, stderr=subprocess.PIPE, text=True, check=False)


@pytest.fixture(scope="module")
def sound():
    return doctor("--json", "--backend", "cpu", HF_TOKEN="hf_do_not_show_me")


@pytest.fixture
def made_up(tmp_path):
    return FakeHost(tmp_path)


@pytest.fixture
def damaged(made_up):
    return made_up.torch(text="raise ImportError('libtorch.so: \\u4e0d\\u5b58\\u5728')\n").site


def lines_of(document, what):
    return [check for check in document["checks"] if check["what"] == what]


def test_this_machine_is_told_about_in_a_document_with_its_kernels(sound):
    assert sound.returncode == 0, sound.stderr + sound.stdout
    document = json.loads(sound.stdout)
    assert document["schema"] == "hwgrpo.doctor/1"
    assert (document["requested"], document["selected"], document["failures"]) == ("cpu", "cpu", [])
    for check in document["checks"]:
        assert set(check) == {"what", "state", "found", "fix", "backends"}
        assert check["state"] in ("ok", "warn", "FAIL")
    assert {c["name"] for c in document["candidates"]} >= {"cpu", "cuda", "npu", "rocm"}
    assert lines_of(document, "import torch")[0]["state"] == "ok"
    assert document["facts"]["torch"]["version"] == torch.__version__
    assert {op["op"]: op["chosen"] for op in document["kernels"]["ops"]}["row_stats"] == "torch"
    assert [(each["name"], each["kernels"]) for each in document["attention"]] == [("sdpa", []), ("eager", [])]
    assert document["rollout"][0] == {"name": "local", "usable": True, "reason": "part of hwgrpo"}
    assert [each["name"] for each in document["rollout"][1:]] == ["sglang_server", "vllm_server"]
    assert document["run"] is None


def test_a_token_of_the_environment_is_in_no_document(sound):
    assert "do_not_show_me" not in sound.stdout
    assert json.loads(sound.stdout)["host"]["environment"]["HF_TOKEN"] == "(set, not shown)"


def test_a_damaged_torch_is_told_in_any_locale(damaged):
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    result = doctor(path=[damaged], **ascii_only)
    assert result.returncode == 1, result.stderr
    assert result.stdout.isascii()
    assert "libtorch.so: \\u4e0d\\u5b58\\u5728" in result.stdout
    assert "warn  locale" in result.stdout
    assert "no backend (requested: auto)" in result.stdout


def test_nobody_listening_changes_neither_exit_status_nor_peace(damaged):
    closed = doctor(path=[damaged], wrap=("sh", "-c", CLOSED, "sh"))
    assert (closed.returncode, closed.stderr) == (1, "")
    reader, writer = os.pipe()
    os.close(reader)
    gone = doctor(path=[damaged], output=writer)
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk_is_told(damaged):
    with open("/dev/full", "w") as full:
        result = doctor(path=[damaged], output=full)
    assert result.returncode == 1
    assert result.stderr.startswith("hwgrpo doctor: the report could not be written: ")
    assert result.stderr.count("\n") == 1


def test_the_two_children_that_import_torch_run_at_once(made_up):
    made_up.torch(text=MEETING)
    result = doctor("--json", "--backend", "cpu", path=[made_up.site])
    assert "was not there" not in result.stdout
    document = json.loads(result.stdout)
    assert (document["selected"], lines_of(document, "import torch")[0]["state"]) == ("cpu", "ok")
    assert "cannot import name 'Tensor'" in document["kernels"]["error"]  # this torch has nothing in it


def test_a_torch_that_kills_its_process_is_told(made_up):
    made_up.torch(text="import os\nos.kill(os.getpid(), 11)\n")
    result = doctor("--json", path=[made_up.site])
    assert result.returncode == 1
    [line] = lines_of(json.loads(result.stdout), "import torch")
    assert "SIGSEGV" in line["found"]


def test_a_broken_vendor_plug_in_is_told_with_its_root_cause_and_what_helps(made_up):
    made_up.torch().torch_npu("raise ImportError('libhccl.so: cannot open shared object file')")
    result = doctor("--json", path=[made_up.site])
    assert result.returncode == 1
    document = json.loads(result.stdout)
    [line] = lines_of(document, "import torch")
    assert "RuntimeError: Failed to load the backend extension: torch_npu <- ImportError: libhccl.so" in line["found"]
    assert line["fix"].startswith("pip uninstall torch-npu, as there is no sign of an NPU here; or, to use one, source")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 does not help" in line["fix"]
    assert lines_of(document, "CANN")[0]["state"] == "FAIL"
    assert lines_of(document, "entry points")[0]["found"] == "torch.backends: torch_npu (torch-npu)"
    assert document["selected"] is None
    assert "uninstall torch-npu" in document["error"]


def on(host, *arguments):
    return doctor(*arguments, path=[host.site], FAKE_ROOT=str(host.root))


H100 = {"name": "NVIDIA H100", "arch": "sm_90", "count": 2}


def test_a_host_with_two_nvidia_gpus(made_up):
    made_up.nodes("nvidia0", "nvidia1").nvidia_driver("580.95.05").torch(("cuda", "13.0"), {"cuda": H100})
    document = json.loads(on(made_up, "--json").stdout)
    assert document["selected"] == "cuda"
    assert "580.95.05 (torch's CUDA 13.0 needs 580 or newer" in lines_of(document, "NVIDIA driver")[0]["found"]
    assert lines_of(document, "NVIDIA nodes")[0]["found"] == "2: /dev/nvidia0, /dev/nvidia1"
    [cuda] = [c for c in document["candidates"] if c["name"] == "cuda"]
    assert (cuda["reason"], cuda["hardware"]) == ("2 x NVIDIA H100", proven_on(get("cuda")))
    assert [each["kernels"] for each in document["attention"] if each["name"] == "sdpa"] == [
        ["flash", "mem_efficient", "math"]
    ]
    # this torch is not enough of one for kernels, which is told, and no more
    assert set(document["failures"]) == {"kernels"}


def test_a_host_whose_nvidia_driver_is_too_old(made_up):
    made_up.nodes("nvidia0").nvidia_driver("550.54.15").torch(("cuda", "13.0"), {"cuda": {}})
    result = on(made_up)
    assert result.returncode == 1
    assert "FAIL  NVIDIA driver" in result.stdout
    assert "550.54.15 is too old: torch's CUDA 13.0 needs 580 or newer" in " ".join(result.stdout.split())
    assert "no backend (requested: auto)" in result.stdout


def test_a_host_with_amd_gpus_which_torch_calls_cuda(made_up):
    seen = {"cuda": {"name": "AMD Instinct MI300X", "arch": "gfx942", "count": 2}}
    made_up.nodes("kfd").torch(("hip", "7.1"), seen)
    document = json.loads(on(made_up, "--json").stdout)
    assert document["selected"] == "rocm"
    assert lines_of(document, "torch")[0]["found"] == "2.13.0, built for rocm 7.1"
    assert lines_of(document, "AMD nodes")[0]["found"] == "1: /dev/kfd"


def test_a_container_whose_gpus_were_left_outside(made_up):
    made_up.file(".dockerenv").nvidia_driver("580.95.05").torch(("cuda", "13.0"), {"cuda": {}})
    document = json.loads(on(made_up, "--json", "--backend", "cuda").stdout)
    [line] = lines_of(document, "NVIDIA nodes")
    assert (line["state"], "--gpus all" in line["fix"]) == ("FAIL", True)
    assert set(document["failures"]) == {"NVIDIA nodes", "backend"}


def test_plug_ins_that_quarrel_over_a_name_do_not_end_the_diagnosis(made_up, damaged):
    made_up.distribution("acme", "1.0", "[hwgrpo.backends]\ncpu = acme:BACKEND\n")
    result = doctor("--json", path=[damaged])
    assert result.returncode == 1, result.stderr
    [line] = lines_of(json.loads(result.stdout), "plug-in cpu (acme)")
    assert "acme (acme:BACKEND) offers a backend named 'cpu', which is built in: rename it" in line["found"]


@pytest.mark.parametrize("damage", [b"\xff\xfe[torch.backends]\n", b"[hwgrpo.backends]\nacme\n", b"[other]\nx\n"])
def test_a_distribution_in_pieces_is_named_and_does_not_end_the_diagnosis(made_up, damage):
    # this torch asks for its plug-ins as the real one does
    made_up.torch().distribution("evil", "1.0")
    (made_up.site / "evil-1.0.dist-info" / "entry_points.txt").write_bytes(damage)
    result = doctor("--json", path=[made_up.site])
    assert result.returncode == 1, result.stderr
    document = json.loads(result.stdout)
    [line] = lines_of(document, "entry points")
    assert line["found"].startswith("evil's entry_points.txt is damaged")
    assert line["fix"] == "pip install --force-reinstall evil"
    assert lines_of(document, "import torch")[0]["fix"] == line["fix"]
    assert document["error"].endswith(f"Fix: {line['fix']}")


def test_a_broken_backend_plug_in_is_a_line(made_up, damaged):
    made_up.distribution("chip", "1.0", "[hwgrpo.backends]\nchip = chip_plugin:BACKEND\n")
    (damaged / "chip_plugin.py").write_text("raise ImportError('libchip.so')\n")
    [line] = lines_of(json.loads(doctor("--json", path=[damaged]).stdout), "plug-in chip")
    assert (line["state"], line["backends"]) == ("FAIL", ["chip"])
    assert "libchip.so" in line["found"]


def test_an_issue_gets_markdown(damaged):
    result = doctor("--github", path=[damaged], HOME=str(damaged), HF_HOME=f"{damaged}/hf", HF_TOKEN="hf_secretsecret")
    assert result.returncode == 1
    assert result.stdout.startswith("### hwgrpo doctor\n\n```text\nhwgrpo ")
    assert "HF_HOME=~/hf" in result.stdout
    assert "HF_TOKEN=(set, not shown)" in result.stdout
    assert str(damaged) not in result.stdout


def test_trials_need_a_torch_that_imports(damaged):
    document = json.loads(doctor("--run", "--json", path=[damaged]).stdout)
    assert document["run"] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--backend", "cudda"], "Did you mean 'cuda'?"),
        (["--timeout", "5"], "add --run"),
        (["--run", "--timeout", "0"], "more than 0"),
        (["--json", "--github"], "not allowed with"),
    ],
)
def test_a_mistake_in_the_command_is_a_usage_error(arguments, told):
    result = doctor(*arguments)
    assert result.returncode == 2
    assert told in result.stderr
    assert result.stdout == ""
