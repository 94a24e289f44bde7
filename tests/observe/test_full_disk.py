"""A disk that fills up while TensorBoard's events are written: one message that says what to do, and all is closed."""

import os
import resource
from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from hwgrpo.errors import RunError
from hwgrpo.observe.loggers import tensorboard
from hwgrpo.observe.observer import Observer
from hwgrpo.support.closing import close_all
from hwgrpo.training import loop
from hwgrpo.training.run_parts import Run
from tests.support.runs import runs


def fill_disk_before(step: int, folder: Path) -> None:
    """Let files become no larger than TensorBoard's is before a step."""
    plain = loop.train_step

    def limited(run: Run, number: int) -> None:
        if number == step:
            (events,) = (folder / "tensorboard").iterdir()
            resource.setrlimit(resource.RLIMIT_FSIZE, (events.stat().st_size + 10, resource.RLIM_INFINITY))
        plain(run, number)

    loop.train_step = limited


def test_a_full_disk_ends_a_run_with_one_message_and_all_of_it_closed(tmp_path: Path, capfd):
    output = tmp_path / "run"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{}")
    words = [*runs.SMALL, f"trainer.output_dir={output}", "backend.name=cpu", "observe.completions_per_step=0"]
    words += ["observe.loggers=[tensorboard,jsonl]", "trainer.max_steps=3"]

    def run() -> None:
        fill_disk_before(2, output)
        closed: list[str] = []
        for part in ("responses", "engine", "rewards", "lock"):
            note_closing(part, closed)
        code = main(["train", str(recipe), *words])
        assert closed == ["responses", "engine", "rewards", "lock"], closed
        os._exit(code)

    def note_closing(part: str, closed: list[str]) -> None:
        plain = loop.train

        def noting(run: Run):
            owner = getattr(run, part)
            close = owner.close
            owner.close = lambda: (closed.append(part), close())
            return plain(run)

        loop.train = noting

    assert runs.forked(run) == 1
    told = capfd.readouterr().err
    assert "Traceback" not in told, told
    assert "hwgrpo: error: logger 'tensorboard' could not write step 2" in told
    assert "make room or restore access there, then start again" in told
    assert "Exception" not in told


class Part:
    def __init__(self, error: Exception | None = None) -> None:
        self.closed, self.error = False, error

    def close(self) -> None:
        self.closed = True
        if self.error is not None:
            raise self.error


def test_all_is_closed_and_the_first_error_is_the_one_that_is_raised(caplog):
    parts = [Part(), Part(OSError("first")), Part(OSError("second")), Part()]
    with pytest.raises(OSError, match="first"):
        close_all(*(part.close for part in parts))
    assert all(part.closed for part in parts)
    assert "second" in caplog.text


def test_an_error_on_its_way_is_not_replaced_by_one_of_closing(caplog):
    parts = [Part(OSError("of closing")), Part()]

    def fail() -> None:
        try:
            raise RunError("why")
        finally:
            close_all(*(part.close for part in parts))

    with pytest.raises(RunError, match="why"):
        fail()
    assert parts[1].closed
    assert "of closing" in caplog.text


def test_a_log_that_cannot_be_closed_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    from hwgrpo.config.schema import ObserveConfig

    monkeypatch.setattr(tensorboard.TensorBoardLogger, "close", Part(OSError(28, "No space left on device")).close)
    observer = Observer(ObserveConfig(progress="none"), tmp_path, total_steps=1, is_main=True)
    with pytest.raises(RunError, match=r"logger 'tensorboard' .* No space left on device; make room"):
        observer.close()
