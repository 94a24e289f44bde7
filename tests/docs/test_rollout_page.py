"""docs/rollout.md lists the engines, and its commands have settings that are right."""

import re
import shlex
from pathlib import Path

import pytest
from hwgrpo_backends.registry import get

from hwgrpo.algorithms import gap_guard
from hwgrpo.catalog import ENGINES
from hwgrpo.cli.main import main
from hwgrpo.doctor.versions import CANN, MATRIX
from tests.docs.pages import REPO, blocks, code, page, table

PAGE = page("rollout.md")
TORCH = "2.13.0"
RECIPE = ("tiny_sort", "model.path=builtin://tiny?task=sort&head=32")
"""One whose model vLLM can run on a CPU."""
TRAINING = [
    words[words.index("hwgrpo") + 1 :]
    for block in blocks(PAGE, "bash")
    for line in block.replace("\\\n", " ").splitlines()
    if "hwgrpo" in (words := shlex.split(line))
]


def test_the_page_lists_the_engines():
    assert sorted(code(row["engine"])[0] for row in table(PAGE, "engine", "what samples")) == sorted(ENGINES.names())


@pytest.mark.parametrize("arguments", TRAINING, ids=lambda words: words[-1])
def test_a_command_has_settings_that_are_right(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The engines need packages and servers, which the tests of vLLM have; a mistake in a setting exits with 2."""
    monkeypatch.chdir(tmp_path)  # runs/tiny_sort of the README's first command has other settings
    named = [each for word in arguments for each in (RECIPE if word == "RECIPE" else (word,))]
    started = arguments[0] == "launch"
    named = [word if word != "--run" else "--print" for word in named]
    backend = "npu" if "ASCEND" in " ".join(named) else "cuda"  # hw: whose variable --visible sets
    status = main([*named, f"backend.name={backend}" if started else "--dry-run"])
    printed = capsys.readouterr()
    assert status in (0, 1), printed.err
    assert (f"{get(backend).visible_env}=0,1,2,3" if started else "schedule") in printed.out


def test_the_thresholds_and_causes_of_the_gap_are_those_of_the_guard():
    rows = table(PAGE, "metric", "equal policies")
    for row, each in zip(rows, gap_guard.THRESHOLDS, strict=True):
        assert code(row["metric"]) == [each.metric]
        limits = [None if limit is None else abs(each.equal - limit) for limit in (each.weigh, each.reject, each.stop)]
        shown = [cell and float(cell) for cell in list(row.values())[1:]]
        assert shown == [each.equal, *("" if limit is None else float(f"{limit:.3g}") for limit in limits)]
    counts = re.search(r"threshold in (\d+) measured steps in a row; it is withdrawn after (\d+)", PAGE)
    assert counts is not None
    assert [int(each) for each in counts.groups()] == [gap_guard.RAISE_AFTER, gap_guard.LOWER_AFTER]
    source = (REPO / "hwgrpo/algorithms/gap_guard.py").read_text()
    causes = [row["cause named"].partition(",")[0] for row in table(PAGE, "pattern", "cause named")]
    assert [cause for cause in causes if f'"{cause}"' not in source] == []


def test_there_are_commands():
    assert len(TRAINING) == 7


def test_the_versions_on_ascend_are_those_that_are_installed():
    rows = {code(row["environment"])[0]: row for row in table(PAGE, "environment", "made by")}
    for name, file in ((".venv", "npu"), (".venv-vllm-ascend", "rollout-vllm-ascend")):
        pins = dict(
            re.findall(r"^([\w-]+)==(\S+)", (REPO / f"scripts/constraints/{file}.txt").read_text(), re.MULTILINE)
        )
        shown = {
            "torch-npu": rows[name]["torch-npu"],
            **dict(re.findall(r"([\w-]+) ([\d.]+\w*)", rows[name]["others"])),
        }
        assert shown.items() <= pins.items()
        assert rows[name]["torch"] == pins.get("torch", TORCH)
    [needs] = [row.needs for row in MATRIX if row.package == "torch-npu" and row.versions == f"=={pins['torch-npu']}"]
    assert needs[CANN] == f"=={rows['.venv-vllm-ascend']['CANN']}"
    assert not [row for row in MATRIX if row.package == "torch-npu" and "2.13" in row.versions and CANN in row.needs]
