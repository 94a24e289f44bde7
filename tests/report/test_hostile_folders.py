"""Folders that a stranger passes off as runs: read in bounds or refused in words, and nothing outside is written."""

import json
import os
import time
from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from hwgrpo.errors import ConfigError
from hwgrpo.observe.summary import save_summary
from hwgrpo.report.page import write_report
from hwgrpo.support.jsonlines import StepLines
from hwgrpo.training.run_folder import FILES, lock_folder, reason_against_folder

CONFIG = "trainer: {max_steps: 4}\n"
METRICS = '{"step": 1, "reward": 0.5}\n'
DEEP, DIGITS = "[" * 100_000 + "]" * 100_000, "9" * 5000
VALUES = ("null", "1e999", DIGITS, "true", '"x"', "[]", "{}", DEEP, "-1", '"\\u001b[2J"', '"\\ud800"')
JSON_FILES = ("environment.json", "kernels.json", "summary.json")
LINES = ("metrics.jsonl", "warnings.jsonl", "completions.jsonl")
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)
CONFIGS = {
    "a bomb": BOMB,
    "deep": "a: " + "[" * 5000,
    "an anchor in itself": "a: &a [*a]",
    "a tag": "a: !!python/object/apply:os.system [touch made]",
    "a number": f"trainer: {{max_steps: {DIGITS}}}",
    "many keys": "".join(f"k{i}: 1\n" for i in range(50_000)),
    "no sections": "trainer: 1\nalgorithm: [1]\nobserve: x\n",
    "other sections": "algorithm: {kl: {estimator: [1], output_clamp: {a: 1}}}\ntrainer: {max_steps: [1]}\n",
    "loggers": "observe: {loggers: {a: 1}}\n",
    "bytes": "\x00\x01",
    "dates": "trainer: {max_steps: 2020-01-01}\n",
}


def folders() -> dict[str, dict[str, str]]:
    """Return the files of each folder by a name that says what is wrong with it."""
    found = {f"config: {name}": {"config.yaml": text, "metrics.jsonl": METRICS} for name, text in CONFIGS.items()}
    for file in JSON_FILES:
        for value in VALUES:
            found[f"{file}: {value[:9]}"] = {file: value}
            found[f"{file} with {value[:9]}"] = {file: f'{{"total_steps": {value}, "status": {value}, "steps": 1}}'}
    for file in LINES:
        for value in VALUES:
            found[f"{file}: {value[:9]}"] = {file: f"{value}\n"}
            found[f"{file}, step {value[:9]}"] = {file: f'{{"step": {value}}}\n'}
        for value in VALUES[:5]:
            record = {"step": 1} | dict.fromkeys(("name", "reward", "rewards", "extras", "uid", "response"), 0)
            text = json.dumps(record).replace(": 0", f": {value}")
            found[f"{file} of {value[:9]}"] = {file: f"{text}\n"}
    return found


FOLDERS = folders()


def test_a_hostile_folder_is_compared_or_refused(tmp_path: Path, capsys):
    (tmp_path / "sound").mkdir()
    (tmp_path / "sound/config.yaml").write_text(CONFIG)
    (tmp_path / "sound/metrics.jsonl").write_text(METRICS)
    for i, (name, files) in enumerate(FOLDERS.items()):
        run = tmp_path / str(i)
        run.mkdir()
        for file, text in ({"config.yaml": CONFIG, "metrics.jsonl": METRICS} | files).items():
            (run / file).write_text(text)
        code = main(["compare-runs", str(tmp_path / "sound"), str(run)])
        printed = capsys.readouterr()
        assert code in (0, 1) or (code == 2 and len(printed.err.splitlines()) == 1), f"{name}: {printed.err}"
        assert "\x1b" not in printed.out + printed.err, name


def test_a_hostile_folder_is_reported_or_refused_in_bounds(tmp_path, capsys):
    assert len(FOLDERS) >= 70
    wrong = {}
    for name, files in FOLDERS.items():
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        for each in run.iterdir():
            each.unlink()
        for file, text in ({"config.yaml": CONFIG} | files).items():
            (run / file).write_text(text)
        start = time.process_time()
        code = main(["report", str(run)])
        seconds = time.process_time() - start
        text = "".join(capsys.readouterr())
        if code not in (0, 1, 2) or seconds > 20 or len(text) > 5000 or "\x1b" in text:
            wrong[name] = (code, seconds, text[:200])
    assert not wrong


@pytest.mark.parametrize("file", ["config.yaml", *JSON_FILES, *LINES, ".lock"])
@pytest.mark.parametrize("kind", ["a pipe", "an endless device", "a folder", "a link to nothing"])
def test_what_is_no_file_is_not_waited_for(kind, file, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    (tmp_path / file).unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(tmp_path / file)
    elif kind == "a folder":
        (tmp_path / file).mkdir()
    else:
        (tmp_path / file).symlink_to("/dev/zero" if kind == "an endless device" else tmp_path / "nothing")
    assert main(["report", str(tmp_path)]) in (0, 1, 2)


def test_a_lock_that_is_a_pipe_is_named_by_a_dry_run_and_a_start(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    assert "it is no file but a pipe" in str(reason_against_folder(tmp_path))
    with pytest.raises(ConfigError, match="cannot be written"):
        lock_folder(tmp_path)


def test_no_file_is_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(CONFIG)
    (run / "metrics.jsonl").write_text(METRICS)
    for name in ("report.html", "report.html.tmp", "summary.json", "summary.json.tmp", "metrics.jsonl.tmp"):
        (run / name).symlink_to(victim)
    write_report(run, run / "report.html")
    save_summary(run, {"steps": 1})
    StepLines(run / "metrics.jsonl").cut_back(0)
    (run / "other.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match=r"other\.jsonl"):
        StepLines(run / "other.jsonl").append({"step": 1})
    assert victim.read_text() == "mine"
    assert "<html" in (run / "report.html").read_text()


@pytest.mark.parametrize("name", FILES)
def test_a_run_does_not_start_where_a_file_that_it_writes_is_a_link(name, tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(victim)
    with pytest.raises(ConfigError, match="is a symbolic link"):
        lock_folder(tmp_path / "run")
    assert victim.read_text() == "mine"
