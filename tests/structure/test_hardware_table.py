"""The README says of every backend what its records say; simulations and compile checks name the tests behind them."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from hwgrpo_backends import registry

from hwgrpo.doctor import hardware
from tests.support.processes.ancestry import ancestry

REPO = Path(__file__).parents[2]
FOLDER = REPO / "benchmarks" / "results" / "hardware"
ROWS = {"CPU": "cpu", "CUDA": "cuda", "ROCm": "rocm", "Ascend NPU": "npu"}
COLUMNS = ["backend", "run on hardware", "simulated", "compiled only"]


def table(text: str) -> dict[str, dict[str, str]]:
    """Return backend -> column -> words of the table under the README's heading."""
    section = text.split("\n## Hardware\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert head == COLUMNS
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def wrong(text: str) -> list[str]:
    """Return what the table of a README says that the records or the folders of tests do not."""
    found, rows = [], table(text)
    found += [f"no row for {name}" for name in ROWS if name not in rows]
    listed = subprocess.run(["bash", REPO / "scripts/test.sh", "--list"], capture_output=True, text=True, check=True)
    grouped = {word for line in listed.stdout.splitlines() for word in line.split()[1:]}
    for label, row in rows.items():
        says = hardware.proven_on(registry.get(ROWS[label]), FOLDER)
        if row["run on hardware"] != says:
            found.append(f"{label} is said to have run on {row['run on hardware']!r}; its records say {says!r}")
        for column in COLUMNS[2:]:
            named = re.findall(r"`tests/([\w/]+)`", row[column])
            if not named and row[column] != "-":
                found.append(f"{label}, {column}: {row[column]!r} names no folder of tests")
            found += [f"{label}: tests/{name} is not there" for name in named if not (REPO / "tests" / name).is_dir()]
            found += [f"{label}: no group runs tests/{name}" for name in named if name.split("/")[0] not in grouped]
    known = {*ROWS.values()}
    strangers = {record["backend"] for record in hardware.records(FOLDER).values()} - known
    return found + [f"no row for {name}, which has a record" for name in sorted(strangers)]


def test_the_table_says_what_the_records_say():
    assert set(ROWS.values()) == set(registry.BUILTIN)
    assert wrong((REPO / "README.md").read_text(encoding="utf-8")) == []


def test_every_file_is_a_valid_record_and_has_the_name_of_its_backend():
    files = sorted(FOLDER.glob("*.json"))
    assert files, "the record of the CPU is missing"
    for file in files:
        document = json.loads(file.read_text(encoding="utf-8"))
        assert hardware.problems(document) == [], file
        assert file.name.startswith(f"{document['backend']}_"), file


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("*.json")))
def test_the_commit_of_a_record_led_here(file: str):
    told = ancestry(REPO, json.loads((FOLDER / file).read_text(encoding="utf-8"))["commit"])
    if told.state == "unknown":
        pytest.skip(f"whether the commit of {file} led here cannot be told: {told.reason}")
    assert told.state == "ancestor", told.reason


RECORD = {
    "schema": "hwgrpo.hardware/1", "backend": "cuda", "chip": "NVIDIA H100", "arch": "sm_90", "devices": 1,
    "driver": "NVIDIA driver 580.1", "system": "Linux", "versions": {"torch": "2.13.0"}, "commit": "0123456789" * 4,
    "date": "2026-01-31",
    "what": [{"name": "tiny_sort", "command": "hwgrpo train", "outcome": "passed", "seconds": 1, "figures": {}}],
}  # fmt: skip


@pytest.mark.parametrize(
    "change, told",
    [
        ({"chip": ""}, "chip is empty"),
        ({"driver": None}, "driver is None"),
        ({"devices": True}, "devices is True"),
        ({"schema": "hwgrpo.hardware/2"}, "schema is 'hwgrpo.hardware/2'"),
        ({"commit": "0123456"}, "is not 40 hexadecimal digits"),
        ({"date": "yesterday"}, "date 'yesterday'"),
        ({"what": []}, "nothing was run"),
        ({"what": ["tiny_sort"]}, "what[0]. is not an object"),
        ({"what": [{**RECORD["what"][0], "outcome": "fine"}]}, "what[0].outcome is 'fine'"),
        ({"what": [{**RECORD["what"][0], "command": ""}]}, "what[0].command is empty"),
        ({"note": "fast"}, "note is not a field"),
    ],
)
def test_a_record_that_leaves_something_out_proves_nothing(tmp_path: Path, change: dict, told: str):
    assert hardware.problems(RECORD) == []
    document = {**RECORD, **change}
    assert any(told in each for each in hardware.problems(document)), hardware.problems(document)
    (tmp_path / "cuda.json").write_text(json.dumps(document))
    assert hardware.proven_on(registry.get("cuda"), tmp_path) == "never run on hardware"


def test_a_part_that_failed_is_said_to_have_failed(tmp_path: Path):
    failed = {**RECORD["what"][0], "name": "doctor --run", "outcome": "failed"}
    (tmp_path / "cuda.json").write_text(json.dumps({**RECORD, "devices": 8, "what": [*RECORD["what"], failed]}))
    assert hardware.proven_on(registry.get("cuda"), tmp_path) == (
        "8 x NVIDIA H100: tiny_sort passed, doctor --run FAILED (commit 0123456, 2026-01-31)"
    )


@pytest.fixture
def repository(tmp_path: Path):
    """A repository of three commits, the second of which is on a branch of its own; returns git and the commits."""

    def git(*words: str, at: Path = tmp_path / "repository") -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *who, "-C", str(at), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    (tmp_path / "repository").mkdir()
    git("init", "-q", "-b", "main")
    commits = []
    for branch in ("main", "side", "main"):
        if commits:
            git("checkout", "-q", *(["-b"] if branch == "side" else []), branch)
        git("commit", "-q", "--allow-empty", "-m", f"{len(commits)}")
        commits.append(git("rev-parse", "HEAD"))
    return tmp_path / "repository", git, commits


def test_an_ancestor_is_told_from_a_commit_of_another_branch(repository):
    where, _, (first, side, last) = repository
    assert ancestry(where, first).state == "ancestor"
    assert ancestry(where, last).state == "ancestor"
    assert ancestry(where, side).state == "stranger"
    assert ancestry(where, "0123456789" * 4).state == "stranger"


def test_where_the_history_is_missing_nothing_is_claimed(repository, tmp_path: Path):
    where, git, (first, _, last) = repository
    git("clone", "-q", "--depth", "1", f"file://{where}", str(tmp_path / "shallow"))
    assert ancestry(tmp_path / "shallow", last).state == "ancestor"
    told = ancestry(tmp_path / "shallow", first)
    assert (told.state, "shallow clone" in told.reason) == ("unknown", True)
    (where / "inside").mkdir()
    assert "not a git checkout" in ancestry(where / "inside", first).reason
