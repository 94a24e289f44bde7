"""A backend from outside the tree: found, judged, proven and trained on, without a line for it in this project."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.devices import acme, simulated_device
from tests.support.numbers.rounding import GENTLE, STEP, assert_metrics_close, drift
from tests.support.processes.launch import ROOT
from tests.support.runs import runs

WORDS = (
    "tiny_sort",
    "model.path=builtin://tiny?task=sort&hidden=32&layers=1&steps=30&batch=32&digits=3",
    "model.dtype=float32",
    "data.train=task://sort?digits=3",
    "trainer.tokens_per_micro_batch=4096",
    "trainer.prompts_per_step=16",
    "data.validation_max_rows=16",
    "observe.loggers=[jsonl]",
    "observe.progress=none",
    *GENTLE,
)
STEPS = 4


def train(output: Path, backend: str, *, folders: list[Path], ranks: int) -> None:
    words = (*WORDS, f"trainer.max_steps={STEPS}", f"trainer.output_dir={output}", f"backend.name={backend}")
    done = simulated_device.train(*words, folders=folders, ranks=ranks, SIMULATED_ACME_DEVICES=str(ranks))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def test_nothing_outside_of_tests_and_docs_knows_the_plug_in():
    paths = [path for name in ("hwgrpo", "backends", "kernels", "configs", "scripts", "benchmarks", ".ci")
             for path in (ROOT / name).rglob("*") if path.is_file() and "__pycache__" not in path.parts]  # fmt: skip
    paths += [path for path in ROOT.iterdir() if path.is_file()]
    assert len(paths) > 200, "nothing was looked at"
    assert [path for path in paths if b"acme" in path.name.lower().encode() + path.read_bytes().lower()] == []


def test_installed_without_its_device_it_is_listed_and_not_chosen(site: Path):
    done = acme.run("detect", "--json", folders=[site])
    document = json.loads(done.stdout)
    assert (done.returncode, document["selected"], document["warnings"]) == (0, "cpu", [])
    [found] = [each for each in document["candidates"] if each["name"] == "acme"]
    assert (found["verdict"], found["devices"]) == ("unusable", 0)
    assert found["reason"] == "no sign of an Acme accelerator (/dev/acme[0-9]*); torch-acme is not installed"
    assert document["facts"]["entry_points"]["hwgrpo.backends"] == ["acme (hwgrpo-acme)"]
    asked = acme.run("detect", "--backend", "acme", folders=[site])
    assert asked.returncode == 1
    assert "go to a host with that device and the CPU build of torch with torch-acme" in asked.stdout


def test_detect_chooses_it_where_its_device_works(host: list[Path]):
    done = acme.run("detect", "--probe", folders=host, SIMULATED_ACME_DEVICES="2")
    assert done.returncode == 0, done.stderr
    assert "* acme  works     2 x Acme One" in done.stdout
    assert "\nbackend: acme (requested: auto)\n" in done.stdout


def test_a_backend_that_is_asked_for_wins_over_it(host: list[Path]):
    done = acme.run("detect", "--probe", "--backend", "cpu", "--json", folders=host)
    assert (done.returncode, json.loads(done.stdout)["selected"]) == (0, "cpu")


@pytest.mark.slow
def test_doctor_tries_its_device_and_its_kernel(host: list[Path]):
    done = acme.forked("doctor", "--run", "--json", folders=host, SIMULATED_ACME_DEVICES="2")
    document = json.loads(done.stdout)
    assert (done.returncode, document["selected"], document["failures"]) == (0, "acme", []), done.stdout
    trials = {(each["device"], each["what"]): each["state"] for each in document["run"]}
    assert trials["acme:1", "kernel row_stats=acme bfloat16"] == "PASS"
    assert trials["acme x 2", "collectives"] == "PASS"
    [found] = [each for each in document["candidates"] if each["name"] == "acme"]
    assert found["hardware"] == "never run on hardware"


@pytest.mark.slow
def test_the_conformance_suites_pass_on_its_device(host: list[Path]):
    code = (
        "from hwgrpo_acme import BACKEND\n"
        "from hwgrpo_acme.kernels import IMPLEMENTATIONS\n"
        "from hwgrpo_backends.testing import check_backend\n"
        "from hwgrpo_kernels.testing import check_kernel\n"
        "print(check_backend(BACKEND))\n"
        "print([check_kernel(each, 'acme') for each in IMPLEMENTATIONS])\n"
    )
    done = acme.forked(code=code, folders=host, SIMULATED_ACME_DEVICES="2")
    assert done.returncode == 0, done.stderr
    backend, kernels = done.stdout.splitlines()
    assert backend.startswith(
        "['data', 'names: kernels, modules, attention, rollout', 'probe', 'device: Acme One (acme"
    )
    assert "visible devices: ACME_VISIBLE_DEVICES='0' leaves 1 of 2" in backend
    assert "collectives: all_reduce, broadcast, all_gather, all_gather_into_tensor, reduce_scatter_tensor, " in backend
    assert " by acmecl over 2 ranks" in backend
    assert "float32: 44 calls agree" in kernels
    assert "bfloat16: 11 calls agree" in kernels
    assert "float64: not run, sums in fp32" in kernels


def test_kernels_lists_its_implementation_as_the_one_that_runs(host: list[Path]):
    done = acme.forked("kernels", "--json", folders=host)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["backend"] == "acme"
    assert {op["op"]: op["chosen"] for op in document["ops"]}["row_stats"] == "acme"
    assert document["plugins"][0]["implementations"] == ["row_stats=acme"]


def test_it_trains_as_the_cpu_does(tmp_path: Path, host: list[Path]):
    train(tmp_path / "cpu", "cpu", folders=[], ranks=2)
    train(tmp_path / "acme", "auto", folders=host, ranks=2)
    about = read(tmp_path / "acme/environment.json")
    assert (about["backend"], about["device"], about["arch"]) == ("acme", "Acme One", "acme_one")
    chosen = {each["op"]: each["implementation"] for each in read(tmp_path / "acme/kernels.json")["choices"]}
    assert chosen["row_stats"] == "acme"
    ours, theirs = ((tmp_path / name / "completions.jsonl").read_text().splitlines() for name in ("acme", "cpu"))
    for mine, other in zip(map(json.loads, ours), map(json.loads, theirs), strict=True):
        assert mine.pop("advantage") == pytest.approx(other.pop("advantage"), abs=STEP)
        assert mine == other
    metrics, expected = runs.metrics(tmp_path / "acme"), runs.metrics(tmp_path / "cpu")
    assert [line["step"] for line in metrics if "actor/grad_norm" in line] == list(range(1, STEPS + 1))
    assert_metrics_close(metrics, expected, drift(STEPS))


RESUMED = """
import sys
from pathlib import Path
import torch
from tests.support.runs import runs
from hwgrpo_acme import BACKEND
folder = Path(sys.argv[1])
words = ("model.dtype=float32", "trainer.save_every=2", "trainer.validate_every=2", "trainer.max_steps=4")
runs.run(folder / "whole", *words, backend=BACKEND)
runs.run(folder / "parts", *words, "trainer.max_steps=2", backend=BACKEND)
torch.manual_seed(99)  # nothing may be left over from the first part
runs.run(folder / "parts", *words, backend=BACKEND)
"""


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_bitwise(tmp_path: Path, host: list[Path]):
    done = acme.forked(str(tmp_path), code=RESUMED, folders=host)
    assert done.returncode == 0, done.stderr[-3000:]
    whole, parts = runs.everything(tmp_path / "whole"), runs.everything(tmp_path / "parts")
    assert [line["step"] for line in parts["metrics"] if "actor/grad_norm" in line] == [1, 2, 3, 4]
    assert parts["metrics"] == whole["metrics"]
    assert parts["weights"] == whole["weights"]
