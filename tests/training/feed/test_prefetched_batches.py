"""What was sampled ahead of training, in checkpoints: it is gone on with while it is what the run would sample."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.data.prompts import PromptDataset
from hwgrpo.support.jsonlines import read_lines
from hwgrpo.training import setup
from hwgrpo.training.checkpoint import checkpoint_files, restore
from hwgrpo.training.feed import group_files, prefetched_batches
from hwgrpo.training.loop import train
from hwgrpo.values import Prompt, PromptBatch, PromptImages
from tests.support.runs import runs

CORRECTED = "algorithm.correction.name=token_truncate"


def drawn(output: Path) -> list[list[str]]:
    """Return the prompts of each step, as the log of completions has them."""
    steps: dict[int, list[str]] = {}
    for line in read_lines(output / "completions.jsonl"):
        steps.setdefault(line["step"], []).append(line["prompt"])
    return [steps[step] for step in sorted(steps)]


class Broken(Exception):
    pass


def cut(output: Path, *words: str, after: int) -> None:
    """Run until a step is saved, and end there as if by a crash."""
    parts = setup.build_run(runs.small(output, *words, "trainer.save_every=1"), BACKEND, 0, 1)
    plain = parts.saver.save

    def save(step: int, **options) -> None:
        plain(step, **options)
        if step == after:
            parts.saver.wait()
            raise Broken

    parts.saver.save = save
    with pytest.raises(Broken):
        train(parts)
    parts.close()


def test_a_run_ahead_that_is_resumed_ends_as_the_uninterrupted_one(tmp_path):
    words = (
        "rollout.max_staleness=1",
        CORRECTED,
        "trainer.validate_every=2",
        "observe.completions_per_step=64",
        "trainer.save_every=1",
    )
    runs.run(tmp_path / "whole", *words)
    cut(tmp_path / "cut", *words, after=3)
    runs.run(tmp_path / "cut", *words)
    assert len(drawn(tmp_path / "whole")) == 6
    assert runs.everything(tmp_path / "cut") == runs.everything(tmp_path / "whole")


def load(checkpoint, source, bound: int):
    """Return the batches that a run with this bound goes on with, and the notes on the others."""
    bounded = (f"rollout.max_staleness={bound}", *([CORRECTED] if bound else []))
    config = runs.small(checkpoint.folder / "unused", *bounded)
    ranks = SimpleNamespace(rank=0, gather_objects=lambda value: [value])
    names = [function.name for function in config.reward.functions]
    return prefetched_batches.load(checkpoint, source, config, names, ranks)  # type: ignore[arg-type]


def loaded(folder: Path, source, bound: int) -> tuple[list[int], list[str]]:
    """Return the steps whose batches a run of this source goes on with after step 3, and the notes on the others."""
    checkpoint = restore.verify(folder / "checkpoints/step-00000003")
    source.restore(checkpoint.manifest["state"]["sampler"])
    prefetched, notes = load(checkpoint, source, bound)
    if prefetched:
        assert prefetched[-1].state == source.state()
    return [4 + i for i in range(len(prefetched))], notes


@pytest.fixture(scope="module")
def far_ahead(tmp_path_factory):
    """A run that ended after step 3, three steps sampled ahead, and a source of the same prompts."""
    output = tmp_path_factory.mktemp("far") / "run"
    words = ("rollout.max_staleness=3", CORRECTED, "trainer.validate_every=0")
    parts = setup.build_run(runs.small(output, *words, "trainer.save_every=3"), BACKEND, 0, 1)
    responses, plain = parts.responses, parts.saver.save

    def save(step: int, **options) -> None:
        if step == 3:
            for _ in range(1000):
                if sum(name.endswith(".words") for file in responses.files().values() for name in file) == 3:
                    break
                threading.Event().wait(0.01)
        plain(step, **options)

    parts.saver.save = save
    train(parts)
    parts.close()
    return output, parts.prompts


def test_what_was_sampled_ahead_is_taken_over(far_ahead):
    assert loaded(*far_ahead, bound=3) == ([4, 5, 6], [])


@pytest.mark.parametrize(("bound", "steps"), [(0, [4]), (1, [4, 5]), (2, [4, 5, 6]), (3, [4, 5, 6])])
def test_what_was_sampled_ahead_is_left_where_its_weights_are_older_than_the_bound_now(
    far_ahead, tmp_path, bound, steps
):
    """The three batches are written anew as if version 3 had sampled them: they are 0, 1 and 2 versions old."""
    output, source = far_ahead
    shutil.copytree(output / "checkpoints", tmp_path / "checkpoints")
    checkpoint = restore.verify(tmp_path / "checkpoints/step-00000003")
    source.restore(checkpoint.manifest["state"]["sampler"])
    batches = load(checkpoint, source, 3)[0]
    young = [
        replace(b, batch=replace(b.batch, completions=replace(b.batch.completions, weight_version=3))) for b in batches
    ]
    for name, tensors in prefetched_batches.files_of(young, 0).items():
        checkpoint_files.write_tensors(checkpoint.folder / name, tensors)
    source.restore(checkpoint.manifest["state"]["sampler"])
    prefetched, notes = load(checkpoint, source, bound)
    assert [4 + i for i in range(len(prefetched))] == steps
    again = f"prefetched responses are sampled again from step {4 + len(steps)} on: rollout.max_staleness={bound}"
    assert notes == ([again] if len(steps) < 3 else [])
    assert source.state() == prefetched[-1].state


def test_what_was_sampled_ahead_is_left_where_the_prompts_are_others(far_ahead, monkeypatch):
    output, source = far_ahead
    plain = PromptDataset.prompt

    def other(dataset: PromptDataset, row: int, epoch: int):
        found = plain(dataset, row, epoch)
        return replace(found, token_ids=found.token_ids[1:])

    monkeypatch.setattr(PromptDataset, "prompt", other)
    steps, notes = loaded(output, source, bound=3)
    assert steps == []
    assert "from step 4 on: the prompts have changed" in notes[0]
    assert source.state() == restore.verify(output / "checkpoints/step-00000003").manifest["state"]["sampler"]


def test_what_was_sampled_ahead_is_left_where_there_are_other_ranks(far_ahead):
    output, source = far_ahead
    steps, notes = loaded(output, replace(source, world_size=2), bound=3)
    assert steps == []
    assert notes == ["prefetched responses are sampled again from step 4 on: 1 ranks sampled them, and now there are 2"]


def test_what_was_sampled_ahead_is_left_where_images_are_others_with_the_same_tokens(far_ahead, monkeypatch):
    output, source = far_ahead
    plain = PromptDataset.prompt

    def other(dataset: PromptDataset, row: int, epoch: int):
        return replace(plain(dataset, row, epoch), images=PromptImages({}, "another", token_id=0))

    monkeypatch.setattr(PromptDataset, "prompt", other)
    steps, notes = loaded(output, source, bound=3)
    assert steps == []
    assert "from step 4 on: the prompts have changed" in notes[0]


def test_a_stored_prompt_is_found_with_its_images_alone():
    """The tokens of two images are equal."""
    ids, images = (1, 2), PromptImages({}, "new", 2, earlier=(PromptImages({}, "first", 2),))
    prompt = Prompt("0:0", "", ids, None, {}, images=images)

    class One:
        def __len__(self) -> int:
            return 1

        def prompt(self, row: int, epoch: int) -> Prompt:
            return prompt

    dataset: Any = One()
    [(uid, token_ids, digests)] = prefetched_batches._prompt_key(PromptBatch((prompt,)))
    assert group_files.prompt_of(uid, token_ids, dataset, digests) == prompt
    assert group_files.prompt_of("0:0", ids, dataset, ["first", "old"]) is None
    assert group_files.prompt_of("0:0", ids, dataset) is None
