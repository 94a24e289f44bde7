"""Nothing that data, models or exceptions hold steers the terminal, forges a line of ours, or shows a secret."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from hwgrpo.cli import main
from hwgrpo.errors import RewardError
from hwgrpo.observe.console.panel import LivePanel
from hwgrpo.observe.console.progress import PlainLines
from hwgrpo.observe.history import RunHistory
from hwgrpo.observe.summary import build_summary
from hwgrpo.observe.warnings import RunWarning
from hwgrpo.support.text import remember_secrets
from hwgrpo.training.evaluate import Scores

HOSTILE = "evil\x1b[2J\x1b]0;owned\x07\r\nhwgrpo: error: forged \x9b31m\u202etxt"
FORGED = "hwgrpo: error: forged"


def harmless(text: str) -> bool:
    """Whether a text that holds HOSTILE does no harm."""
    assert "evil" in text
    return not any(line.startswith(FORGED) for line in text.split("\n")) and all(
        char.isprintable() or char == "\n" for char in text
    )


def warning() -> RunWarning:
    return RunWarning(3, "flat", f"reward of {HOSTILE}", HOSTILE, (f"look at {HOSTILE}",))


def summary() -> dict:
    history = RunHistory()
    history.add(0, {f"val-core/{HOSTILE}/reward/greedy": 0.5})
    history.add(1, {"reward": 0.5, f"val-core/{HOSTILE}/reward/greedy": 0.5})
    return build_summary(
        history,
        status="completed",
        total_steps=1,
        resumed_from=0,
        wall_s=1.0,
        paths={"model": Path("runs") / HOSTILE},
        warnings=[warning()],
    )


SHOWN = {
    "note": lambda way: way.note(f"a reward failed: {HOSTILE}"),
    "validation": lambda way: way.validation(1, {f"val-core/{HOSTILE}/reward/greedy": 0.5}),
    "warning": lambda way: way.warning(warning().text),
    "summary": lambda way: way.summary(summary()),
}


@pytest.mark.parametrize("what", SHOWN)
def test_lines_of_progress_are_ours(what):
    stream = io.StringIO()
    SHOWN[what](PlainLines(9, 1, stream))
    assert harmless(stream.getvalue())


@pytest.mark.parametrize("what", ["note", "warning", "summary"])
def test_what_scrolls_above_the_panel_is_ours(what):
    stream = io.StringIO()
    SHOWN[what](LivePanel(Console(file=stream, width=400), "run", 9))
    assert harmless(stream.getvalue())


def test_an_error_is_ours_to_its_last_line_and_shows_no_secret(monkeypatch, capsys):
    remember_secrets(["planted-4567"])

    def fail(_args):
        raise RewardError(f"reward mine failed: HTTPError: planted-4567 {HOSTILE}\n  as it was")

    monkeypatch.setattr("hwgrpo.cli.config.run", fail)
    assert main.main(["config"]) == 1
    told = capsys.readouterr().err
    assert harmless(told)
    assert "planted" not in told
    assert "HTTPError: *** evil" in told
    assert told.endswith("\n    as it was\n")


def test_what_an_inspection_of_data_shows_is_ours(tmp_path, capsys):
    rows = [
        {"prompt": "1+1", "answer": "2", "data_source": HOSTILE, HOSTILE: 1},
        {"prompt": "1+1", "answer": "2", "data_source": "b"},
        {"prompt": [{"role": HOSTILE, "content": "x"}], "answer": "2", "data_source": "b"},
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main.main(["data", "inspect", str(file)])
    assert harmless(capsys.readouterr().out)


def test_what_an_evaluation_prints_is_ours(tmp_path, monkeypatch, capsys):
    scores = Scores(torch.ones(1, 1), [HOSTILE], [HOSTILE], 0, [], [])
    evaluation = SimpleNamespace(
        greedy=lambda: scores,
        sampled=lambda _n: scores,
        rewards=SimpleNamespace(close=lambda: None),
        dataset=Data(),
        notes=(),
    )
    monkeypatch.setattr("hwgrpo.training.evaluate.build_evaluation", lambda *_: evaluation)
    host = SimpleNamespace(backend=SimpleNamespace(name="cpu"), local_rank=0)
    monkeypatch.setattr("hwgrpo.cli.backend_selection.prepare_host", lambda _config: host)
    words = ["model.path=builtin://tiny", "data.train=task://sort", "reward.functions=[exact_match]"]
    recipe = tmp_path / "empty.yaml"
    recipe.write_text("{}")
    assert main.main(["eval", str(recipe), *words, "--n", "1"]) == 0
    assert harmless(capsys.readouterr().out)


class Data(list):
    name = HOSTILE
    available = 1
    prompts_with_images = 0
