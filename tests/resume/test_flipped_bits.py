"""A flipped bit in any file of a run's newest checkpoint: the one before is used, or nothing differs."""

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import runs
from saving import flipped

from hwgrpo.training.resume import find_checkpoint

FLIPS = int(os.environ.get("HWGRPO_TEST_FLIPS", "60"))
"""Shared out evenly among the files."""
WORDS = (
    "trainer.save_every=1",
    "trainer.validate_at_start=false",
    "trainer.validate_every=0",
    "rollout.max_staleness=1",
    "algorithm.correction.name=token_truncate",
    "model.lora.rank=2",
    "model.lora.dropout=0.1",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train three steps of four: checkpoints of the second and the third are there."""
    output = tmp_path_factory.mktemp("flipped") / "run"
    assert runs.forked(lambda: runs.run(output, *WORDS, "trainer.max_steps=4", "trainer.keep_checkpoints=3")) == 0
    shutil.rmtree(output / "checkpoints/step-00000004")
    return output


def resumed(output: Path) -> dict:
    assert runs.forked(lambda: runs.run(output, *WORDS, "trainer.max_steps=4")) == 0
    return runs.everything(output)


def test_a_flipped_bit_falls_back_with_a_note_or_changes_nothing(tmp_path: Path, run: Path):
    output, generator, counts = tmp_path / "run", random.Random(0), Counter()
    (output / "checkpoints").mkdir(parents=True)
    for step in (2, 3):
        shutil.copytree(run / f"checkpoints/step-{step:08d}", output / f"checkpoints/step-{step:08d}")
    config = runs.small(output, *WORDS, "trainer.max_steps=4")
    newest = output / "checkpoints/step-00000003"
    files = sorted(newest.iterdir())
    assert [path.name.partition("-")[0].partition(".")[0] for path in files] == [
        "ahead", "manifest", "manifest", "moments", "rng", "weights"
    ]  # fmt: skip
    for path in files:
        for _ in range(-(-FLIPS // len(files))):
            with flipped(path, generator.randrange(8 * path.stat().st_size)):
                checkpoint, notes = find_checkpoint(config, output)
                assert checkpoint is not None
                if checkpoint.step == 3:
                    shutil.copytree(output, tmp_path / "accepted")
                    assert resumed(tmp_path / "accepted")["weights"] == resumed(run)["weights"]
                    shutil.rmtree(tmp_path / "accepted")
                else:
                    assert checkpoint.step == 2
                    named = "manifest.json" if path.name.startswith("manifest") else path.name
                    assert any(str(newest / named) in note for note in notes), notes
                counts[path.name, checkpoint.step] += 1
    print(dict(counts))
    assert find_checkpoint(config, output)[0].step == 3
