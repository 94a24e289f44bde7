"""`hwgrpo kernels` from the shell: this host, another device, a run's folder, mistakes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

OPS = {"row_stats", "row_grad", "token_logprob", "linear_logprob"}
RUN = {
    "schema": "hwgrpo.kernels/1",
    "pins": {"row_grad": "torch"},
    "preference": ["swift", "torch"],
    "strict": True,
    "choices": [
        {
            "op": "row_stats", "device_type": "cpu", "dtype": "bfloat16", "shape_class": 262144,
            "implementation": "torch", "pinned_by": None, "skipped": {"swift": "needs wings"}, "line": "",
        },
        {
            "op": "row_grad", "device_type": "cpu", "dtype": "bfloat16", "shape_class": 262144,
            "implementation": "torch", "pinned_by": "kernels.pins", "skipped": {}, "line": "",
            "declined": {"windy": 3},
        },
        {
            "op": "linear_logprob", "device_type": "cpu", "dtype": "bfloat16", "shape_class": 262144,
            "implementation": "torch", "pinned_by": None, "skipped": {}, "line": "",
        },
    ],
    "plugins": [{"name": "p", "value": "p:q", "implementations": [], "error": "ImportError: no wings"}],
}  # fmt: skip


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "a_run"
    folder.mkdir()
    (folder / "kernels.json").write_text(json.dumps(RUN))
    return folder


def test_every_op_and_why_its_kernel_runs_is_told(hwgrpo):
    done = hwgrpo("kernels", "--device", "cpu", HWGRPO_KERNELS="row_grad=torch")
    assert done.returncode == 0, done.stderr
    assert "cpu, float32, vocabulary of 151,936" in done.stdout
    told = {line.split()[0]: line for line in done.stdout.splitlines() if "* " in line}
    assert set(told) >= OPS
    assert "pinned by HWGRPO_KERNELS" in told["row_grad"]
    assert told["token_logprob"].split()[-4:] == ["runs", "the", "only", "one"]
    assert "token_logprob and linear_logprob in torch run row_stats and row_grad as selected above." in done.stdout
    assert "the first of the preferred that can run" in told["row_stats"]
    assert "pins       row_grad=torch" in done.stdout
    assert "strict     off" in done.stdout
    assert "\033" not in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())


def test_json_holds_the_same_under_a_versioned_schema(hwgrpo):
    done = hwgrpo("kernels", "--json", "--dtype", "bfloat16", "--vocab", "32000", HWGRPO_STRICT="1")
    found = json.loads(done.stdout)
    assert set(found) == {
        "schema", "backend", "dtype", "vocab", "reason_against_fp32_products",
        "pins", "preference", "strict", "plugins", "ops",
    }  # fmt: skip
    assert (found["schema"], found["backend"]) == ("hwgrpo.kernels.survey/1", "cpu")
    assert (found["dtype"], found["vocab"], found["strict"]) == ("bfloat16", 32000, True)
    assert found["reason_against_fp32_products"] == "torch.mm has no out_dtype on cpu"
    assert {op["op"] for op in found["ops"]} >= OPS
    for op in found["ops"]:
        assert set(op) == {"op", "summary", "verdicts", "error", "chosen"}
        assert op["chosen"] == op["verdicts"][0]["name"] == "torch"
        assert all(set(each) == {"name", "state", "reason", "origin"} for each in op["verdicts"])


def test_another_device_is_asked_for_by_its_name(hwgrpo):
    done = hwgrpo("kernels", "--device", "rocm")  # hw: the word under test
    assert done.returncode == 0, done.stderr
    assert "rocm, bfloat16" in done.stdout
    absent = [line.split() for line in done.stdout.splitlines() if "absent" in line]
    assert absent == [["triton", "absent", "no", "kernel", "of", "that", "name"]] * 2


def test_a_run_tells_what_it_chose_without_loading_torch(hwgrpo, run_folder: Path):
    done = hwgrpo("kernels", "--run", run_folder)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "cpu, bfloat16, V <= 262,144" in lines["row_stats"]
    assert "not swift: needs wings" in lines["row_stats"]
    assert "declined 3 calls: windy" in " ".join(done.stdout.split())
    assert "pinned by kernels.pins" in lines["row_grad"]
    assert "linear_logprob  * torch  cpu, bfloat16, V <= 262,144  preferred\n" in done.stdout
    assert "linear_logprob in torch runs row_stats and row_grad as selected above." in done.stdout
    assert "on: falling back is an error" in lines["strict"]
    assert "p failed: ImportError: no wings" in lines["plug-in"]
    assert json.loads(hwgrpo("kernels", "--run", run_folder, "--json").stdout) == RUN

    code = (
        "import sys; from hwgrpo.cli.main import main\n"
        f"main(['kernels', '--run', {str(run_folder)!r}])\n"
        "assert not {'torch', 'transformers', 'omegaconf'} & sys.modules.keys(), 'imported'\n"
    )
    root = Path(__file__).resolve().parents[2]
    path = ":".join(str(root / folder) for folder in (".", "backends", "kernels"))
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("words", "environment", "parts"),
    [
        (["--run", "nowhere"], {}, ["--run nowhere", "no such folder", "trainer.output_dir"]),
        (["--run", "."], {}, ["no kernels.json", "first step"]),
        (["--run", "a_run", "--dtype", "float32"], {}, ["--dtype cannot be combined with --run"]),
        (["--device", "cpuu"], {}, ["--device='cpuu'", "Did you mean 'cpu'?"]),
        (["--dtype", "float31"], {}, ["--dtype='float31'", "Did you mean 'float32'?"]),
        (["--vocab", "0"], {}, ["--vocab 0", "1 or more"]),
        ([], {"HWGRPO_KERNELS": "row_sats=torch"}, ["HWGRPO_KERNELS", "'row_sats'", "Did you mean 'row_stats'?"]),
        ([], {"HWGRPO_KERNELS": "row_stats=tocrh"}, ["HWGRPO_KERNELS", "'tocrh'", "Did you mean 'torch'?"]),
        ([], {"HWGRPO_KERNELS": "row_stats"}, ["HWGRPO_KERNELS", "op=implementation"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(hwgrpo, run_folder: Path, words, environment, parts):
    done = hwgrpo("kernels", *words, **environment)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{torn", ["kernels.json is not JSON"]),
        ('{"schema": "hwgrpo.kernels/9"}', ["'hwgrpo.kernels/9'", "reads 'hwgrpo.kernels/1'"]),
        ("[]", ["the schema None"]),
    ],
)
def test_a_file_of_another_kind_is_refused(hwgrpo, run_folder: Path, text: str, parts: list[str]):
    (run_folder / "kernels.json").write_text(text)
    done = hwgrpo("kernels", "--run", run_folder)
    assert done.returncode == 2
    for part in parts:
        assert part in done.stderr
