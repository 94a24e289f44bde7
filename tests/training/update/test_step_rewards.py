"""Runs with rewards of steps: on ranks, in each layout, with LoRA, killed and resumed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hwgrpo.errors import ConfigError
from hwgrpo.training.update.policy_update import PolicyUpdate
from tests.support.processes import ranks
from tests.support.runs import digit_rewards, runs

REWARDS = digit_rewards.__file__
RUN = (
    "algorithm.advantage.name=process",
    f"algorithm.process.function={REWARDS}:characters",
    f"reward.functions=[{REWARDS}:digits]",
    "data.validation_max_rows=0",
    "trainer.validate_every=0",
    "optim.eps=1e-2",
)


def first_step(folder: Path, *words: str, processes: int = 1) -> dict[str, Any]:
    def body(rank: int) -> None:
        torch.set_num_threads(1)
        strategy = f"trainer.strategy={'ddp' if processes > 1 else 'single'}"
        runs.run(folder, *RUN, strategy, "trainer.max_steps=1", "model.lora.rank=4", *words)

    assert ranks.forked(processes, body) == [0] * processes
    return next(line for line in runs.metrics(folder) if "actor/loss" in line)


def test_ranks_and_layouts_train_alike(tmp_path: Path):
    one = first_step(tmp_path / "padded", "model.layout=padded")
    two = first_step(tmp_path / "ranks", "model.layout=padded", processes=2)
    packed = first_step(tmp_path / "packed", "model.layout=packed", "trainer.tokens_per_micro_batch=64")
    assert one["actor/grad_norm"] > 0.01
    assert one["response/steps/max"] > 1
    for other in (two, packed):
        for name in ("actor/grad_norm", "actor/pg_loss", "critic/advantages/max", "response/steps/mean", "reward"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path):
    words = (*RUN, "trainer.max_steps=4", "trainer.save_every=2", "trainer.prompts_per_update=2")

    def die_in_step_4() -> None:
        plain, calls = PolicyUpdate.__call__, [0]

        def deadly(self, batch):
            calls[0] += 1
            if calls[0] == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(self, batch)

        PolicyUpdate.__call__ = deadly
        runs.run(tmp_path / "killed", *words)

    assert runs.forked(lambda: runs.run(tmp_path / "whole", *words)) == 0
    assert runs.forked(die_in_step_4) == -signal.SIGKILL
    assert runs.forked(lambda: runs.run(tmp_path / "killed", *words)) == 0
    assert runs.everything(tmp_path / "killed") == runs.everything(tmp_path / "whole")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("algorithm.process.pattern='('",), "pattern='\\(' is no regular expression"),
        (("algorithm.process.pattern=x",), r"pattern='x' has no effect with algorithm\.process\.function"),
        (("algorithm.process.delimiter=''",), "delimiter is empty"),
        (("reward.shuffle=true",), "permutes one reward per response"),
        (("algorithm.process.function=nowhere.py:f",), "there is no file"),
        (("algorithm.loss.name=gmpo",), "the loss of a sequence with one advantage"),
    ],
)
def test_settings_without_meaning_are_refused(words: tuple[str, ...], said: str, tmp_path: Path):
    own = [word for word in RUN if "function=" not in word] if "regular" in said or "empty" in said else RUN
    with pytest.raises(ConfigError, match=said):
        runs.run(tmp_path / "run", *own, *words)
