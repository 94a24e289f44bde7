"""Every script of benchmarks/ runs in its --smoke form, and every page of results says how it was made."""

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hwgrpo.config.load import load_config
from tests.support.processes.ancestry import ancestry
from tests.support.processes.launch import forked
from tests.support.processes.preloaded_programs import programs

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
SLOW = ("against_trl", "curves", "grouped_update", "memory", "overlap", "real_model", "strategies")
FORKED = ("agent_curves", "curves", "dynamic_sampling", "online_reward_model", "overlap", "real_model")
"""Scripts of which only the runs they start count: these are forked from a process that has imported the project.
Others measure what they start, or talk to it."""
PAGES = sorted((FOLDER / "results").glob("*.md"))
RUNS = REPO / "scripts" / "benchmarks.sh"
SOURCE = os.pathsep.join(str(REPO / folder) for folder in (".", "backends", "kernels"))


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder with one thread; what a script sets in this process is set back."""
    import torch
    from transformers.utils import logging

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    monkeypatch.syspath_prepend(FOLDER)
    verbosity, threads, drawn = logging.get_verbosity(), torch.get_num_threads(), torch.get_rng_state()
    yield
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()
    torch.set_num_threads(threads)
    torch.set_rng_state(drawn)


@pytest.fixture
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a program that does what `python WORDS` does, without the seconds of imports."""
    folder = tmp_path_factory.mktemp("python")
    with programs(folder, {"python": ()}):
        yield folder / "python"


def repository() -> dict[str, int]:
    """Return when each file of benchmarks/ was last written, and of the repository's own folder."""
    files = [*FOLDER.rglob("*"), *REPO.iterdir()]
    return {str(file): file.stat().st_mtime_ns for file in files if file.is_file() and file.suffix != ".pyc"}


def run_main(script: Path, arguments: list[str]) -> int:
    spec = importlib.util.spec_from_file_location(f"benchmark_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(arguments) or 0


def table_rows(text: str) -> list[str]:
    """Return the rows below the first head of a Markdown table."""
    return [line for line in text.partition("\n|---")[2].splitlines()[1:] if line.startswith("|")]


def source_line(run: str, page: str) -> str:
    """Return what stands between a run's marks."""
    return page.partition(f"<!-- {run} -->")[2].partition(f"<!-- end of {run} -->")[0]


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize(
    "script", [pytest.param(each, id=each.stem, marks=[pytest.mark.slow] * (each.stem in SLOW)) for each in SCRIPTS]
)
def test_a_smoke_run_ends_well_prints_its_table_and_leaves_the_repository_alone(
    script, tmp_path, capfd, monkeypatch, python
):
    before = repository()
    if script.stem in FORKED:
        monkeypatch.setattr(sys, "executable", str(python))
    arguments = ["--smoke"]
    if '"--output"' in script.read_text(encoding="utf-8"):
        arguments += ["--output", str(tmp_path / "results.json")]
    if script.stem == "strategies":
        done = forked(2, str(script), *arguments)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        code = run_main(script, arguments)
        out, err = capfd.readouterr()
    assert code == 0, err
    assert table_rows(out), out
    assert "--output" not in arguments or (tmp_path / "results.json").stat().st_size
    if script.stem == "against_trl":
        [result] = json.loads((tmp_path / "results.json").read_text())["results"]
        assert 0 < result["hwgrpo"]["above_imports_mib"] < result["hwgrpo"]["peak_mib"]
    assert repository() == before


@pytest.fixture
def model(_elsewhere, tmp_path: Path) -> Path:
    """Return the folder of a tiny model."""
    from hwgrpo.models.loading import resolve_model_path

    source = resolve_model_path("builtin://tiny?task=copy&hidden=32&layers=1&steps=1")
    return Path(shutil.copytree(source, tmp_path / "folder-model"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_sides_can_train_adapters_on_the_model_of_a_folder(dtype, model, tmp_path, capfd):
    output = tmp_path / "results.json"
    arguments = ["--smoke", "--setting", "arithmetic", "--model", str(model), "--dtype", dtype]
    assert run_main(FOLDER / "against_trl.py", [*arguments, "--output", str(output)]) == 0
    [result] = json.loads(output.read_text())["results"]
    ours = result["hwgrpo"]
    assert ours["trained_parameters"] < ours["parameters"]
    assert ours["trained_dtypes"] == ["float32"]
    assert (result["agreement"]["full_gradient"] > 1e-5) == (dtype == "bfloat16"), "products are rounded in bf16 alone"
    assert len(ours["rewards"]) == 2, "of the step that warms up, and of the timed one"
    assert ours["greedy_before"]["rows"] == ours["greedy_after"]["rows"] > 0
    assert all(result["agreement"][key] <= limit for key, limit in result["tolerances"].items())
    [row] = table_rows(capfd.readouterr().out)
    assert row.startswith("| arithmetic, ")


@pytest.mark.parametrize(("rows", "threads"), [(8, "1"), (16, "free")])
def test_the_engine_is_measured_with_the_model_of_a_folder(rows, threads, model, tmp_path, capfd):
    output = tmp_path / "results.json"
    arguments = ["--smoke", "--model", str(model), "--rows", str(rows), "--threads", threads, "--output", str(output)]
    assert run_main(FOLDER / "local_engine.py", arguments) == 0
    [result] = json.loads(output.read_text())
    assert result["tokens"] == rows * result["settings"]["response_tokens"]
    assert len(result["threads"]) == len(result["wall_s"]["hwgrpo"])
    assert 1 <= result["threads"][0] <= (os.cpu_count() or 1)
    assert result["products_s"].keys() == {"linear", "packed"}
    for seconds in result["products_s"].values():
        assert len(seconds) == len(result["wall_s"]["hwgrpo"])
        assert min(seconds) > 0
    embeddings = 32 * json.loads((model / "config.json").read_text())["vocab_size"]
    assert result["flops_per_token"] > 2 * embeddings, "of the LM head, and of the layers"
    assert "| folder-model | float32 | hwgrpo |" in capfd.readouterr().out


@pytest.mark.usefixtures("_elsewhere")
def test_saved_responses_are_graded_by_each_grader_that_is_there(tmp_path, capsys):
    answered = {"#### 18": "18", "The answer is 18": "18", "#### 1,080.00": "1080", "": "3"}
    rows = [
        {"row": row, "ground_truth": truth, "response": response, "finished": True}
        for row, (response, truth) in enumerate(answered.items())
    ]
    responses, output, verl = tmp_path / "responses.jsonl", tmp_path / "results.json", tmp_path / "verl"
    responses.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = verl / "verl" / "utils" / "reward_score" / "gsm8k.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "def compute_score(solution_str, ground_truth, method):\n"
        "    return int(method == 'flexible' and solution_str.endswith(ground_truth))\n"
    )
    arguments = ["--responses", str(responses), "--verl", str(verl), "--output", str(output)]
    assert run_main(FOLDER / "graders.py", arguments) == 0
    results = json.loads(output.read_text())
    missing = "not run: --trl-python is not given"
    assert results["correct"] == {
        "hwgrpo by_value": 2,
        "hwgrpo lenient": 3,
        "hwgrpo strict": 1,
        "hwgrpo flexible": 2,
        "verl strict": 0,
        "verl flexible": 2,
        "trl accuracy_reward": missing,
        "math_verify": missing,
    }
    assert [row["row"] for row in results["disagreements"]] == [0, 1, 2]
    out = capsys.readouterr().out
    assert "| verl strict | 0 | 0.0% | hwgrpo strict: 1 |" in out
    assert "| verl flexible | 2 | 50.0% | hwgrpo flexible: 0 |" in out


def test_every_benchmark_has_a_smoke_form_and_is_among_the_runs():
    runs = listed() + " "
    for script in SCRIPTS:
        assert 'add_argument("--smoke"' in script.read_text(encoding="utf-8"), f"{script.name}: give it --smoke"
        assert f"benchmarks/{script.name} " in runs, f"{script.name}: add it to {RUNS.name}"


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize(
    ("script", "arguments", "remedy"),
    [
        ("against_trl", ["--trl-python", "PYTHON"], "-m pip install trl"),
        ("against_trl", ["--smoke", "--setting", "arithmetic"], "scripts/fetch_smollm2.py FOLDER"),
        ("against_trl", ["--smoke", "--setting", "add", "--model", "folder"], "leave it out"),
        ("local_engine", ["--rows", "12"], "a multiple of 8"),
        ("local_engine", ["--threads", "free", "--peer", "vllm"], "give a number"),
        ("graders", [], "scripts/fetch_smollm2.py FOLDER"),
        ("curves", ["--ways", "single", "--output", "curves.csv", "--server-python", "PYTHON"], "-m pip install vllm"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line_with_what_to_type(script, arguments, remedy, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')  # has no packages
    python.chmod(0o755)
    given = [str(python) if each == "PYTHON" else each for each in arguments]
    with pytest.raises(SystemExit) as ended:
        run_main(FOLDER / f"{script}.py", given)
    assert remedy in str(ended.value)
    assert "\n" not in str(ended.value)


def test_pages_of_results_name_their_commands_and_commits():
    for page in PAGES:
        text = " ".join(page.read_text(encoding="utf-8").split())
        commands = re.findall(r"`((?:python|torchrun|hwgrpo) [^`]+)`", text)
        assert commands, f"{page.name}: name the command"
        for script in re.findall(r"\S+\.py\b", " ".join(commands)):
            assert (REPO / script).exists(), (page.name, script)
        commits = re.findall(r"\bcommit ([0-9a-f]{7,40})\b", text)
        assert commits, f"{page.name}: name the commit"
        for commit in commits:
            assert ancestry(REPO, commit).state != "stranger", (page.name, commit)


def test_each_table_that_is_replaced_has_a_run_and_each_run_its_place():
    lines = [line.split() for line in listed().splitlines()]
    for page in PAGES:
        runs = {run for run, name, *_ in lines if name == page.name}
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"<!-- (\w+) -->", text)) == set(re.findall(r"<!-- end of (\w+) -->", text)) == runs
        for run in runs:
            place = source_line(run, text)
            assert re.search(r"`,\scommit\s[0-9a-f]{7,40},\s", place), run
            assert table_rows(place), run


def test_a_run_replaces_its_table_alone_and_one_that_fails_ends_no_other(tmp_path):
    before = repository()
    python = tmp_path / "python"
    table = r"noise\n| model | x |\n|---|---|\n| new | 1 |\n"
    python.write_text(
        f"#!/bin/sh\ncase $1 in *local_engine.py) printf '{table}' ;; *startup.py) exit 3 ;; "
        f"*) exec '{sys.executable}' \"$@\" ;; esac\n"
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(RUNS), "--smoke", "startup", "local_engine"],
        env=os.environ | {"PYTHON": str(python), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    startup, engine, results = done.stdout.splitlines()[-3:]
    assert startup.startswith("startup: failed")
    assert engine.startswith("local_engine: finished"), done.stderr
    copy = Path(results.partition("results: ")[2])
    assert copy.is_relative_to(tmp_path)
    page = (copy / "local_engine.md").read_text(encoding="utf-8")
    place = source_line("local_engine", page)
    assert re.search(r"`python benchmarks/local_engine.py --smoke`, commit \w+", place)
    assert table_rows(place) == ["| new | 1 |"]
    published = (FOLDER / "results" / "local_engine.md").read_text(encoding="utf-8")
    assert page.replace(place, "") == published.replace(source_line("local_engine", published), "")
    assert repository() == before


def test_an_unknown_run_is_named_with_those_there_are():
    done = subprocess.run(["bash", str(RUNS), "curve"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown run 'curve'" in done.stderr
    assert "curves" in done.stderr


def listed() -> str:
    return subprocess.run(["bash", str(RUNS), "--list"], capture_output=True, text=True, check=True).stdout


def test_the_settings_of_every_way_to_train_the_published_model_are_valid(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(FOLDER)
    real_model = importlib.import_module("real_model")
    for way, settings in real_model.WAYS.items():
        config = load_config(real_model.RECIPE, ["model.path=builtin://tiny", *settings], data_may_be_missing=True)
        assert bool(config.model.lora.rank) == way.startswith("LoRA"), way
