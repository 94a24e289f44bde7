"""scripts/gpu_visit.sh keeps what every item said and how it ended, whatever becomes of the others, and in its time."""

import errno
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import gpu_visit_items as items  # noqa: E402
import gpu_visit_runner as runner  # noqa: E402

SCRIPT = REPO / "scripts" / "gpu_visit.sh"


class Machine:
    """Stands for the items' processes: how each ends, and a clock that goes on by the seconds that it takes."""

    def __init__(self, folder: Path, codes: dict[str, int] | None = None, seconds: dict[str, float] | None = None):
        self.folder = folder
        self.codes, self.seconds = codes or {}, seconds or {}
        self.started: list[tuple[str, float]] = []
        self.now = 0.0

    def start(self, name: str, log: Path, seconds: float) -> int:
        self.started.append((name, seconds))
        self.now += self.seconds.get(name, 0.0)
        code = self.codes.get(name, 0)
        log.write_text(
            f"the log of {name}\n"
            + (f"result: so far\nresult: {name} was fast\n" if code in (0, runner.TIMED_OUT) else "broken\n")
        )
        return code

    def visit(self, *names: str, minutes: float | None = None, dry: bool = False, shapes: str = "A B C") -> int:
        self.folder.mkdir(exist_ok=True)
        all_items = runner.all_items(shapes.split())
        return runner.Visit(self.folder, self.start, all_items, minutes, dry, clock=lambda: self.now).run(names)

    @property
    def lines(self) -> list[tuple[str, int, str]]:
        return [(line.name, line.code, line.result) for line in runner.Line.read(self.folder / "steps.tsv")]


@pytest.fixture
def machine(tmp_path):
    return lambda **how: Machine(tmp_path / "out", **how)


def test_an_item_that_fails_or_takes_too_long_ends_no_other(machine, capsys):
    here = machine(codes={"tests": 3, "update": runner.TIMED_OUT, "lora": 137})
    assert here.visit() == 1
    names = [name for name in runner.all_items(["A", "B", "C"]) if name != "real"]
    assert [name for name, _, _ in here.lines] == [name for name, _ in here.started] == names
    assert {name: code for name, code, _ in here.lines if code} == {"tests": 3, "update": 124, "lora": 137}
    results = {name: result for name, _, result in here.lines}
    assert (results["update"], results["facts"]) == ("update was fast", "facts was fast")  # the last one counts
    assert results["tests"] == "broken"  # the last line
    assert results["lora"] == "no result within 100 s"
    printed = capsys.readouterr().out
    assert all(f"== {name} ==\nthe log of {name}\n" in printed for name in names)


def test_items_of_later_calls_are_added_and_each_call_answers_for_its_own(machine):
    here = machine(codes={"tests": 1})
    assert here.visit("tests") == 1
    assert here.visit("parity", "bench-B") == 0
    assert [(name, code) for name, code, _ in here.lines] == [("tests", 1), ("parity", 0), ("bench-B", 0)]


def test_no_speed_is_measured_where_the_numbers_are_not_those_of_fp64(machine):
    here = machine(codes={"parity": 1})
    measuring = [name for name, item in runner.all_items(["B"]).items() if item.measures]
    assert measuring == ["decode", "update", "step", "ragged", "trl", "head", "lora", "bench-B", "real"]
    assert here.visit("parity", *measuring) == 1
    assert [name for name, _ in here.started] == ["parity"]
    assert {code for _, code, _ in here.lines[1:]} == {runner.NO_PARITY}
    assert f"bash scripts/gpu_visit.sh {here.folder} parity" in here.lines[1][2]
    here.codes = {}
    assert here.visit("parity", "bench-B") == 0


def test_the_parity_of_a_dry_run_is_none_for_a_measurement(machine):
    here = machine()
    assert here.visit("parity", "step", dry=True) == 0
    assert all(result.startswith("dry: ") for _, _, result in here.lines)
    assert here.visit("step") == 1
    assert here.lines[-1][1] == runner.NO_PARITY
    assert here.visit("parity", "step") == 0
    assert here.visit("step", dry=True) == 1


def test_what_fits_into_the_minutes_runs_in_order_of_value_and_the_rest_is_named(machine, capsys):
    expected = {name: item.expected for name, item in runner.all_items(["A", "B", "C"]).items()}
    here = machine(seconds={**expected, "update": 30})
    assert here.visit(minutes=5) == 0
    # 295 s without those for the archive: 60 + 15 + 45 + 30 leave 145, of which step takes 80 and resume 50
    began = [name for name, _ in here.started]
    assert began == ["parity", "facts", "decode", "update", "step", "resume", "kernels"]
    limits = dict(here.started)
    assert (limits["decode"], limits["step"], limits["resume"], limits["kernels"]) == (90, 145, 65, 15)
    printed = capsys.readouterr().out
    assert "left out: fused: it takes about 50 s, and 15 s were left" in printed
    assert "- tests: it takes about 400 s, and 5 s were left" in (here.folder / "summary.md").read_text()
    assert "real" not in printed


def test_named_items_run_in_the_order_of_their_names_and_within_the_minutes(machine):
    here = machine(seconds={"record": 300})
    assert here.visit("record", "kernels", "real", "facts", minutes=6) == 0
    assert here.started == [("record", 355), ("kernels", 55), ("facts", 55)]


def test_an_item_that_cannot_run_here_fails_only_a_visit_that_names_it(machine):
    here = machine(codes={"trl": runner.NOT_HERE})
    assert here.visit() == 0
    assert here.visit("trl") == 1


def test_an_unknown_item_is_a_failure_that_says_where_the_items_are(machine):
    here = machine()
    assert here.visit("bnech-A") == 1
    assert here.lines == [("bnech-A", 2, "scripts/gpu_visit.sh: unknown item 'bnech-A'; --list prints the items")]


def test_a_limit_in_the_environment_is_that_of_every_item(machine, monkeypatch):
    monkeypatch.setenv("LIMIT", "7")
    here = machine()
    here.visit("parity", "tests", "nonsense")
    assert here.started == [("parity", 7), ("tests", 7)]


def test_one_archive_has_everything_after_each_item(machine):
    here = machine()
    names: list[list[str]] = []
    written = here.start

    def looking(name: str, log: Path, seconds: float) -> int:
        archive = here.folder.with_name("out.tar.gz")
        if archive.exists():
            with tarfile.open(archive) as file:
                names.append(sorted(file.getnames()))
        return written(name, log, seconds)

    here.start = looking
    (here.folder).mkdir()
    (here.folder / "facts.json").write_text(json.dumps({"chip": "a chip", "commit": "12ab"}))
    here.visit("facts", "kernels")
    assert names == [["out", "out/facts.json", "out/facts.log", "out/steps.tsv", "out/summary.md"]]
    summary = (here.folder / "summary.md").read_text()
    assert "- chip: a chip\n- commit: 12ab\n" in summary
    assert "| kernels | kernels was fast | 0 | 0 |" in summary


def test_a_full_disk_or_facts_that_were_cut_off_end_no_visit(machine, monkeypatch, capsys):
    here = machine()
    here.folder.mkdir()
    (here.folder / "facts.json").write_text('{"chip": ')

    def full(*_, **__):
        here.folder.with_name("out.tar.part").write_text("a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile, "open", full)
    assert here.visit("facts", "kernels") == 1
    assert [name for name, _, _ in here.lines] == ["facts", "kernels"]
    assert "out.tar.gz cannot be written: No space left on device" in capsys.readouterr().out
    assert not here.folder.with_name("out.tar.part").exists()


def test_a_folder_holds_measurements_or_a_dry_run_and_options_stand_anywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "_start", lambda out, work: Machine(out).start)
    monkeypatch.setattr(runner, "_dry_start", lambda out, work: Machine(out).start)
    monkeypatch.setattr(runner, "has_pytest", lambda: True)
    measured, dry = str(tmp_path / "measured"), str(tmp_path / "dry")
    assert runner.main([measured, "--minutes", "5", "parity"]) == 0
    assert runner.main([dry, "--dry", "parity"]) == 0
    assert runner.main([measured, "facts"]) == 0
    capsys.readouterr()
    for words, held in (([measured, "--dry", "facts"], "measurements"), ([dry, "facts"], "a dry run")):
        assert runner.main(words) == 2
        assert f"{words[0]} holds {held}: name another folder" in capsys.readouterr().err


def test_lines_of_an_earlier_version_are_read(tmp_path):
    (tmp_path / "steps.tsv").write_text("parity\t0\t12 s\tparity.log\n")
    assert runner.Line.read(tmp_path / "steps.tsv") == [runner.Line("parity", 0, 12, "parity.log", "")]


STUBBORN = "trap '' TERM; (while :; do sleep 0.05; done) & echo $!; while :; do sleep 0.05; done"
"""Ignores the request to end, as does its child, whose number it prints."""


@pytest.mark.parametrize("way", ["process", "fork"])
def test_a_limit_ends_an_item_that_resists_and_what_it_started(tmp_path, monkeypatch, way):
    log, command = tmp_path / "log", ["bash", "-c", STUBBORN]
    passed = itertools.count(step=100)

    def clock() -> float:
        return next(passed) if log.exists() and log.read_text().endswith("\n") else 0.0  # from then on it is too late

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    if way == "process":
        assert runner.start_process(command, log, 60) == 128 + 9
    else:  # the fork itself does end when it is asked to
        assert runner.start_fork(lambda: subprocess.run(command).returncode, log, 60) in (runner.TIMED_OUT, 128 + 9)
    assert not is_running(int(log.read_text()))


def test_what_an_item_leaves_behind_ends_with_it(tmp_path):
    assert runner.start_process(["bash", "-c", "sleep 60 & echo $!; exit 3"], tmp_path / "log", 30) == 3
    assert not is_running(int((tmp_path / "log").read_text()))


def is_running(pid: int) -> bool:
    """Return whether a process runs, after a moment to end in; a zombie does not."""
    file = Path(f"/proc/{pid}/stat")
    for _ in range(200):
        try:
            state = file.read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return False
        if state in "ZX":
            return False
        time.sleep(0.01)
    return True


def test_an_exit_code_of_a_signal_is_that_of_a_shell(tmp_path):
    assert runner.start_process(["bash", "-c", "kill -SEGV $$"], tmp_path / "log", 30) == 128 + 11


@pytest.mark.parametrize("item", ["tests", "sanitizer", "fused"])
def test_a_visit_without_pytest_names_the_set_up_before_any_item(item, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "has_pytest", lambda: False)
    monkeypatch.setattr(runner, "start_process", lambda command, log, seconds: log.write_text("") or 0)
    assert runner.main([str(tmp_path / "out"), "facts", item]) == 2
    assert "bash scripts/setup.sh --dev" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for arguments in (["--minutes", "9", str(tmp_path / "out"), "facts", item], [str(tmp_path / "out"), "facts"]):
        assert runner.main(arguments) == 0


def test_every_item_has_a_function_and_every_function_is_an_item():
    named = set(runner.all_items([]))
    assert named == set(items.FUNCTIONS)
    assert all(0 < item.expected <= item.limit for item in runner.all_items(["A", "B", "C", "small"]).values())


@pytest.fixture
def visit(tmp_path, monkeypatch):
    """A visit whose commands are kept and not run."""
    commands: list[str] = []

    def hwgrpo(self, *arguments, env=None, seconds=None):
        commands.append(" ".join(arguments))
        if "--json" in arguments:
            side = {"name": "triton", "group": "ours", "state": "timed", "median_s": 0.002}
            case = {"name": "linear_logprob", "sides": [side, {**side, "group": "peer", "name": "TRL"}]}
            Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps({"shapes": [{"cases": [case]}]}))
        return 0

    monkeypatch.setattr(items.Visit, "hwgrpo", hwgrpo)
    made = items.Visit(tmp_path / "out", tmp_path / "work", dry=False)
    made.out.mkdir()
    made.work.mkdir()
    return made, commands


def test_a_bench_has_its_shape_and_rounds_and_names_our_times(visit, monkeypatch):
    here, commands = visit
    monkeypatch.setenv("REPEAT", "4")
    assert items.bench(here, "bench-B") == "linear_logprob 2.00 ms (triton)"
    items.head(here)
    assert commands == [
        f"bench kernels --shape B --repeat 4 --json {here.out}/bench-B.json",
        f"bench kernels --shape B --repeat 3 --json {here.out}/head.json --only linear_logprob,linear_token_loss",
    ]


def test_parity_compares_three_ways(visit):
    here, commands = visit
    assert items.parity(here) == "3 of 3 comparisons with fp64 passed"
    saved = here.out / "parity.safetensors"
    assert commands == [f"parity model.dtype=float32 --save {saved}", "parity", "parity --families"]


def test_the_record_names_the_commit_of_a_copy(visit, monkeypatch):
    here, _ = visit
    ran: list[list[str]] = []

    def record(command, cwd):
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(items.subprocess, "run", record)
    monkeypatch.setenv("COMMIT", "12ab")
    items.record(here)
    assert ran[0][1:] == ["scripts/record_hardware.py", "--out", f"{here.out}/hardware", "--commit", "12ab"]


@pytest.mark.parametrize("item", ["tests", "fused", "sanitizer"])
def test_only_tests_of_a_device_run_on_one(visit, monkeypatch, item):
    here, _ = visit
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(items.Visit, "pytest", lambda self, name, *words: called.append((name, *words)) or "")
    items.FUNCTIONS[item](here)
    [(name, *words)] = called
    assert (name, words[:2]) == (item, ["tests/gpu", "-k"])


@pytest.mark.parametrize(("of_trl", "ratio"), [([30.0, 8.0], "TRL takes 4.00 times as long"), ([30.0], None)])
def test_trl_is_compared_where_both_sides_ended_all_steps(visit, monkeypatch, of_trl, ratio):
    here, _ = visit
    monkeypatch.setattr(items, "find_missing", lambda module: False)
    monkeypatch.setattr(items.Visit, "model", lambda self: self.work)
    monkeypatch.setattr(items, "step_metrics", lambda folder: [{"timing_s/step": 9.0}, {"timing_s/step": 2.0}])

    def start(self, name, *words, env):
        Path(words[1], "seconds.txt").write_text("\n".join(map(str, of_trl)))
        return SimpleNamespace(exit_code=lambda limit: 0 if len(of_trl) == 2 else runner.TIMED_OUT)

    monkeypatch.setattr(items.Visit, "start", start)
    said = items.trl(here)
    assert ("times as long" in said) == (ratio is not None)
    assert ratio is None or said.split("; ")[2].startswith(ratio), "before the sides with cuDNN"


def test_a_missing_sanitizer_model_or_trl_is_no_success(visit, monkeypatch, tmp_path):
    here, commands = visit
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SMOLLM2", "GSM8K"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(items, "find_missing", lambda module: module == "trl")
    monkeypatch.setattr(items.Visit, "model", lambda self: self.work)
    for item, named in ((items.sanitizer, "compute-sanitizer"), (items.real, "SMOLLM2"), (items.trl, "PACKAGES")):
        with pytest.raises(items.NotHereError, match=named):
            item(here)
    assert commands == []


def test_one_changed_bit_of_a_checkpoint_is_found(tmp_path):
    for name in ("whole", "cut"):
        folder = tmp_path / name / "checkpoints" / "step-00000006"
        folder.mkdir(parents=True)
        (folder / "weights-rank0.safetensors").write_bytes(b"weights")
        (folder / "moments-rank0.safetensors").write_bytes(b"moments")
        (folder / "manifest.json").write_text(name)
    runs = tmp_path / "whole", tmp_path / "cut"
    assert items.compare_checkpoints(*runs, 6) == "all 2 files of the checkpoint of step 6 are equal bit by bit"
    (folder / "moments-rank0.safetensors").write_bytes(b"momentr")
    with pytest.raises(items.FailedError, match=r"differ in moments-rank0\.safetensors of"):
        items.compare_checkpoints(*runs, 6)
    (folder / "moments-rank0.safetensors").unlink()
    with pytest.raises(items.FailedError, match="other files"):
        items.compare_checkpoints(*runs, 6)
    with pytest.raises(items.FailedError, match="other files"):
        items.compare_checkpoints(*runs, 4)


def test_the_script_prints_its_help_and_its_items():
    def said(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHON": sys.executable, "SHAPES": "A"}
        return subprocess.run(["bash", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True)

    usage = said()
    assert (usage.returncode, usage.stdout) == (2, "")
    header = SCRIPT.read_text().split("\nset -uo")[0].splitlines()[1:]
    assert usage.stderr.splitlines() == [line.removeprefix("#").removeprefix(" ") for line in header]
    listed = said("--list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [*runner.all_items(["A"])]


@pytest.mark.slow
def test_a_dry_run_ends_every_item_and_marks_each_result(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "SHAPES": "A"}
    environment["TMPDIR"] = str(tmp_path)
    command = ["bash", str(SCRIPT), "--dry", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    lines = runner.Line.read(tmp_path / "out" / "steps.tsv")
    assert [line.name for line in lines] == [*runner.all_items(["A"])]
    assert {line.name for line in lines if line.code == runner.NOT_HERE} <= {"fused", "sanitizer", "trl"}
    assert {line.code for line in lines} <= {0, runner.NOT_HERE}
    assert all(line.result.startswith("dry: ") and len(line.result) > 10 for line in lines)
    results = {line.name: line.result for line in lines}
    assert "files of the checkpoint of step 6 are equal bit by bit" in results["resume"]
    assert re.search(r"resumed from step [24]", results["resume"])
    assert "as a graph" in results["decode"]
    assert "fused modules: refused" in results["update"]
    assert len(re.findall(r"steps of \d", results["ragged"])) == 2
    assert re.search(r"ours with cuDNN off: steps of \d", results["trl"])
    assert "linear_logprob" in results["head"]
    assert re.search(r"adapters merged: 16 rows x 80: [\d.]+ ms", results["lora"])
    assert not [*tmp_path.glob("hwgrpo-visit-*")]  # models and runs are removed
    for name in ("decode", "update", "lora", "lora_merged"):
        assert json.loads((tmp_path / "out" / f"{name}.json").read_text())["dry"] is True
    passes = json.loads((tmp_path / "out" / "update.json").read_text())["own modules"]
    assert [(each["layout"], each["cudnn"], each["reason"]) for each in passes] == [
        (layout, cudnn, "") for cudnn in (True, False) for layout in ("grouped", "packed", "padded")
    ]
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert {f"out/{line.log}" for line in lines} <= set(archive.getnames())
        summary = archive.extractfile("out/summary.md")
        assert summary is not None
        assert "nothing here is a measurement" in summary.read().decode()
