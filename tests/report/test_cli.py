"""`hwgrpo report` from the command line."""

import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

from hwgrpo.cli.main import main

STEPS = [{"step": step, "reward": 0.1 * step} for step in range(1, 8)]


def test_it_writes_the_page_into_the_run_and_says_where(make_run, capsys: pytest.CaptureFixture[str]):
    folder = make_run(STEPS)
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out.startswith(f"wrote {folder / 'report.html'} (")


def test_output_and_open(make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    output = tmp_path / "pages" / "mine.html"
    assert main(["report", str(make_run(STEPS)), "--output", str(output), "--open"]) == 0
    assert opened == [output.as_uri()]
    assert output.exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["nowhere"], ["nowhere", "no such folder", "trainer.output_dir"]),
        (["."], ["is not the folder of a run"]),
        (["run", "--output", "run"], ["--output run is a folder", "report.html"]),
        (["run", "--completions", "-1"], ["--completions -1", "0 or more"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], parts: list[str], make_run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(make_run(STEPS).parent)
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert all(part in error for part in parts), error


def test_a_report_is_written_without_torch(make_run):
    code = (
        "import sys; from hwgrpo.cli.main import main\n"
        f"assert main(['report', {str(make_run(STEPS))!r}]) == 0\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys(), 'imported'\n"
    )
    path = [entry for entry in sys.path if entry]
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"], check=True)
