"""Every script of benchmarks/ runs in its --smoke form, and every page of results says how it was made."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.ancestry import ancestry
from tests.support.processes.launch import forked

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
SLOW = ("against_trl", "curves", "grouped_update", "memory", "overlap", "strategies")
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
def test_a_smoke_run_ends_well_prints_its_table_and_leaves_the_repository_alone(script, tmp_path, capfd):
    before = repository()
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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_benchmark_has_a_smoke_form_and_is_among_the_runs(script):
    assert 'add_argument("--smoke"' in script.read_text(encoding="utf-8"), f"{script.name}: give it --smoke"
    assert f"benchmarks/{script.name} " in listed() + " ", f"{script.name}: add it to {RUNS.name}"


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize(
    ("script", "arguments", "remedy"),
    [
        ("against_trl", ["--trl-python", "PYTHON"], "-m pip install trl"),
        ("curves", ["--ways", "single", "--output", "curves.csv", "--server-python", "PYTHON"], "-m pip install vllm"),
    ],
)
def test_a_missing_package_is_one_line_with_what_to_type(script, arguments, remedy, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')  # has no packages
    python.chmod(0o755)
    given = [str(python) if each == "PYTHON" else each for each in arguments]
    with pytest.raises(SystemExit) as ended:
        run_main(FOLDER / f"{script}.py", given)
    assert remedy in str(ended.value)
    assert "\n" not in str(ended.value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_results_names_its_command_and_commit(page):
    text = " ".join(page.read_text(encoding="utf-8").split())
    commands = re.findall(r"`((?:python|torchrun|hwgrpo) [^`]+)`", text)
    assert commands, "name the command"
    for script in re.findall(r"\S+\.py\b", " ".join(commands)):
        assert (REPO / script).exists(), script
    commits = re.findall(r"\bcommit ([0-9a-f]{7,40})\b", text)
    assert commits, "name the commit"
    for commit in commits:
        assert ancestry(REPO, commit).state != "stranger", commit


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_table_that_is_replaced_has_a_run_and_each_run_its_place(page):
    runs = {line.split()[0] for line in listed().splitlines() if line.split()[1] == page.name}
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
