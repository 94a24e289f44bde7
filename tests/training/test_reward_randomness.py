"""Rewards that draw random numbers: the same ones after a resume, whatever is imported when and wherever they run."""

import builtins
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from hwgrpo.rewards.randomness import seeded
from hwgrpo.training import loop
from tests.support.runs import runs

DRAWS = """
import random

def drawn(solution_str):
    import draws_when_imported
    import numpy
    return random.random() + numpy.random.rand()

def drawn_at_once(completions):
    import draws_when_imported
    return [random.random() for _ in completions]

async def drawn_async(solution_str):
    import draws_when_imported
    return random.random()
"""
NOISY = """
import random
import numpy

random.random()
numpy.random.rand()
"""
WORDS = ("trainer.save_every=1", "trainer.validate_every=1", "trainer.validation_n=1", "data.validation_max_rows=2")


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    (tmp_path / "drawing.py").write_text(DRAWS)
    (tmp_path / "draws_when_imported.py").write_text(NOISY)
    return tmp_path / "drawing.py"


def trained(output: Path, reward: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in a process that has not imported anything of the rewards, and that draws in its first step."""

    def body() -> None:
        monkeypatch.syspath_prepend(str(output.parent))
        plain = loop.train_step

        def first_imports(run: loop.Run, step: int) -> None:
            if step == run.start_step + 1:
                random.random()
                np.random.rand()
            plain(run, step)

        loop.train_step = first_imports
        runs.run(output, *WORDS, f"trainer.max_steps={steps}", f"reward.functions=[{reward}]")

    assert runs.forked(body) == 0


@pytest.mark.parametrize(
    "settings",
    ["{name: FILE:drawn}, {name: FILE:drawn_at_once}, {name: FILE:drawn_async}", "{name: FILE:drawn, workers: 2}"],
)
def test_a_reward_that_draws_gives_the_same_after_a_resume(
    tmp_path: Path, rewards: Path, settings: str, monkeypatch: pytest.MonkeyPatch
):
    reward = settings.replace("FILE", str(rewards))
    trained(tmp_path / "whole", reward, 3, monkeypatch)
    for steps in (1, 3):
        trained(tmp_path / "parts", reward, steps, monkeypatch)
    whole = runs.everything(tmp_path / "whole")
    assert runs.everything(tmp_path / "parts") == whole
    scores = [line["critic/rewards/mean"] for line in whole["metrics"] if "critic/rewards/mean" in line]
    assert len({*scores}) == 3, "each step draws its own"


def drawn(*seed: int | str, noise: bool = False) -> tuple[float, float]:
    with seeded(*seed):
        if noise:
            import draws_when_imported  # noqa: F401
        return random.random(), float(np.random.rand())


def test_draws_depend_on_every_part_of_the_seed_and_on_no_import_of_a_module_that_draws(
    rewards: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(rewards.parent))
    plain = builtins.__import__
    assert drawn(1, 2) == drawn(1, 2) == drawn(1, 2, noise=True)
    assert len({drawn(*seed) for seed in ((1, 2), (2, 1), (12,), (1, "2"), (1, 2, 0), ())}) == 6
    assert builtins.__import__ is plain


def test_an_import_in_another_thread_gives_no_draws_back(rewards: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(rewards.parent))
    ready, done = threading.Event(), threading.Event()

    def beside() -> None:
        ready.wait(10)
        import draws_when_imported  # noqa: F401

        done.set()

    thread = threading.Thread(target=beside)
    thread.start()
    with seeded(1):
        first = random.random()
        ready.set()
        assert done.wait(10)
        assert random.random() != first
    thread.join()
