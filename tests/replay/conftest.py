"""Captured runs that several tests replay."""

from pathlib import Path

import pytest

from tests.support.runs.captures import TWO_UPDATES, capture


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two captured steps of a run with old and reference log-probs, whose checkpoints are kept."""
    output = tmp_path_factory.mktemp("captured") / "run"
    return capture(output, *TWO_UPDATES, "trainer.save_every=1", "trainer.keep_checkpoints=3")


@pytest.fixture(scope="session")
def captures_with_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two captured steps of a run whose passes draw random numbers."""
    output = tmp_path_factory.mktemp("captured") / "run"
    return capture(output, "model.lora.rank=4", "model.lora.dropout=0.1", "trainer.max_steps=1")


@pytest.fixture(scope="session")
def captures_with_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two captured steps of the same run, with the weights in them."""
    output = tmp_path_factory.mktemp("captured") / "run"
    return capture(output, *TWO_UPDATES, "trainer.capture_weights=true")
