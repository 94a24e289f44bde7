"""A flipped bit in any file of a run's newest checkpoint: the one before is used, or nothing differs."""

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from hwgrpo.training.checkpoint import restore
from hwgrpo.training.resume import find_checkpoint
from tests.support.runs import runs
from tests.support.runs.saving import flipped

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
    shutil.copytree(run, output)
    newest = output / "checkpoints/step-00000003"
    files = sorted(newest.iterdir())
    assert [path.name.partition("-")[0] for path in files] == [
        "ahead", "manifest.json", "manifest.sha256", "moments", "resume", "rng", "weights"
    ]  # fmt: skip
    expected = resumed(run)["weights"]
    for path in files:
        named = newest / ("manifest.json" if path.name.startswith("manifest") else path.name)
        for _ in range(-(-FLIPS // len(files))):
            with flipped(path, generator.randrange(8 * path.stat().st_size)):
                checkpoint, problems = restore.newest(output / "checkpoints")
                assert checkpoint is not None
                counts[path.name, checkpoint.step] += 1
                if checkpoint.step == 2:
                    assert str(named) in problems[0]
                else:
                    shutil.copytree(output, tmp_path / "accepted")
                    assert resumed(tmp_path / "accepted")["weights"] == expected
                    shutil.rmtree(tmp_path / "accepted")
    print(f"by file and step that is used: {dict(counts)}")
    content = bytearray((newest / "manifest.json").read_bytes())
    content[content.index(b'"position": ') + len(b'"position": ')] ^= 1
    (newest / "manifest.json").write_bytes(content)
    _, notes = find_checkpoint(runs.small(output, *WORDS, "trainer.max_steps=4"), output)
    assert any(f"{newest}/manifest.json is damaged" in note for note in notes)
    assert resumed(output)["weights"] == expected
