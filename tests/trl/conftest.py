"""What the tests of TRL's front door share."""

from pathlib import Path

import pytest
import torch

from tests.trl.tiny_chat_model import save_chat_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a small chat model in `model`."""
    torch.set_num_threads(1)
    save_chat_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path
