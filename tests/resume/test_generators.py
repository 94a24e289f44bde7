"""A resumed run goes on with the random numbers of an uninterrupted one, whatever its set-up drew."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from hwgrpo.training.checkpoint import checkpoint_files
from tests.support.runs import runs, supervised_runs

DRAWING = """
import random

import numpy
import torch


class Drawing:
    def __init__(self, folder):
        random.random(), numpy.random.rand(), torch.rand(1)

    def cut_back(self, step):
        pass

    def log(self, step, values):
        pass

    def close(self):
        pass
"""
"""A logger whose class draws where it is made, as packages do that are imported then."""
IN_A_PROCESS = f"reward.functions=[{{name: '{Path(runs.__file__).parent}/dense_reward.py:share_right', timeout: 60}}]"


def generators(output: Path, step: int) -> dict[str, bytes]:
    """Return the random states in a checkpoint."""
    file = checkpoint_files.folder_of(output / "checkpoints", step) / checkpoint_files.rng_file(0)
    return {name: bytes(state.tolist()) for name, state in load_file(file).items()}


@pytest.mark.parametrize(
    ("run", "settings"), [(runs.run, (IN_A_PROCESS,)), (supervised_runs.run, ())], ids=["grpo", "sft"]
)
def test_what_the_set_up_draws_does_not_move_the_generators(tmp_path: Path, run, settings: tuple[str, ...]):
    (tmp_path / "loggers.py").write_text(DRAWING)
    settings = (*settings, "trainer.save_every=2", f"observe.loggers=[jsonl,{tmp_path}/loggers.py:Drawing]")
    for folder, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        output = tmp_path / folder
        assert runs.forked(lambda: run(output, *settings, f"trainer.max_steps={steps}")) == 0  # noqa: B023 (run at once)
    assert generators(tmp_path / "parts", 2) == generators(tmp_path / "whole", 2)
    assert generators(tmp_path / "parts", 4) == generators(tmp_path / "whole", 4)
