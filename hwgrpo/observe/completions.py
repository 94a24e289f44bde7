"""completions.jsonl: responses and their rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo.observe.image_text import content_text, count_images, with_labels
from hwgrpo.observe.logged_images import FOLDER, LoggedImages, image_record
from hwgrpo.observe.trajectory_text import compact_turns
from hwgrpo.support.jsonlines import StepLines, read_lines
from hwgrpo.values import NO_ROW, Thumbnail

if TYPE_CHECKING:
    import torch

    from hwgrpo.values import Completions, Prompt, PromptBatch, PromptImages, Rewards

    MakeRecords = Callable[[Sequence[Thumbnail]], list[dict[str, Any]]]

FILE = "completions.jsonl"


@dataclass(frozen=True)
class Sample:
    """One response, to be shown."""

    prompt: str
    """The last user message of a conversation, else the prompt; `[image 32x32]` where it shows an image."""
    response: str
    """Of a trajectory its turns (`compact_turns`)."""
    reward: float | None
    """None when a failure policy took the sample out."""
    ground_truth: Any = None


def pick_sample(step: int, batch: PromptBatch, completions: Completions, rewards: Rewards) -> Sample | None:
    """Return the sample to show for a step, at another position of the batch each step; None for an empty batch.

    Args:
        step: step number; decides the place, so that the choice is neither random nor flattering.
        batch: the G prompts of the step.
        completions: their S responses.
        rewards: [S] rewards.
    """
    if len(completions) == 0:
        return None
    index = step % len(completions)
    prompt = batch.prompts[int(completions.prompt_index[index])]
    reward = float(rewards.total[index]) if rewards.valid[index] else None
    thumbnails = thumbnails_of(observed_images(completions, index))
    turns = compact_turns(completions.outcomes[index], thumbnails) if completions.outcomes else None
    response = response_text(completions, index) if turns is None else turns
    return Sample(shown_prompt(prompt), response, reward, prompt.ground_truth)


def shown_prompt(prompt: Prompt) -> str:
    """Return the last user message of a conversation, else the prompt, with a label where an image stands."""
    if prompt.images is None:
        return last_user_message(prompt) or prompt.text
    thumbnails, said = iter(prompt.images.all_thumbnails), ""
    for message in prompt.messages or ():
        content = message["content"]
        text = content_text(content, [*islice(thumbnails, count_images(content))])
        said = text if message["role"] == "user" else said
    return said or labelled_text(prompt)


def labelled_text(prompt: Prompt) -> str:
    """Return the model's input text, with a label where an image stands."""
    return prompt.text if prompt.images is None else with_labels(prompt.text, prompt.images.parts)


def response_text(completions: Completions, sample: int) -> str:
    """Return a response, with a label where an image was observed."""
    return with_labels(completions.texts[sample], observed_images(completions, sample))


def thumbnails_of(images: Sequence[PromptImages]) -> list[Thumbnail]:
    """Return the thumbnails of images, in order."""
    return [thumbnail for each in images for thumbnail in each.all_thumbnails]


def observed_images(completions: Completions, sample: int) -> Sequence[PromptImages]:
    """Return the images that were observed in a response."""
    return completions.seen[sample] if completions.seen else ()


def last_user_message(prompt: Prompt) -> str | None:
    """Return the last user message of a conversation; None for a plain prompt."""
    said: list[Any] = [message["content"] for message in prompt.messages or () if message["role"] == "user"]
    if not said:
        return None
    parts = [{"text": said[-1]}] if isinstance(said[-1], str) else said[-1]
    return "\n".join(part["text"] for part in parts if part.get("text"))


def complete_groups_first(prompt_index: list[int], limit: int) -> list[int]:
    """Select at most `limit` samples: every group that still fits completely, in order, then parts of the others.

    A group is worth most when it is complete, since its advantages are relative to one another.

    Args:
        prompt_index: S ascending prompt numbers, one per sample.
        limit: the most samples to choose.

    Returns:
        The chosen sample numbers, ascending.
    """
    groups: dict[int, list[int]] = {}
    for sample, prompt in enumerate(prompt_index):
        groups.setdefault(prompt, []).append(sample)
    chosen: list[int] = []
    left_out: list[int] = []
    for group in groups.values():
        if len(chosen) + len(group) <= limit:
            chosen += group
        else:
            left_out += group
    return sorted(chosen + left_out[: max(0, limit - len(chosen))])


def without_files(thumbnails: Sequence[Thumbnail]) -> list[dict[str, Any]]:
    """Return what a record has of images whose thumbnails are not written."""
    return [*map(image_record, thumbnails)]


def sample_record(
    sample: int,
    batch: PromptBatch,
    completions: Completions,
    rewards: Rewards,
    images: MakeRecords = without_files,
) -> dict[str, Any]:
    """Return what there is to know about one response, ready for a JSON line.

    `reward` is null for a sample that a failure policy took out, and an entry of `rewards` where the function gave no
    value; `question` is the last user message of a conversation, else null; what reward functions returned beside the
    score goes to `extras`; `outcome` is that of a trajectory in an environment. A response that has one, or tokens that
    were not sampled, also has its `tokens`, and in `sampled` the bounds `[start, stop]` of each run of sampled ones.
    One that forked has in `rows` the first token of each further row, and the tokens of the prompt before it.
    `images` are those of the prompt, and `observed_images` those in the response, each as `{file, width, height}`;
    where `response` shows one, it has `[image 640x480]` in place of the image's tokens.

    Args:
        sample: its number, 0 <= sample < S.
        batch: the G prompts.
        completions: their S responses.
        rewards: [S] rewards.
        images: thumbnails -> what a record has of them (`LoggedImages.records`).
    """
    prompt = batch.prompts[int(completions.prompt_index[sample])]
    per_function = {name: float(values[sample]) for name, values in rewards.per_function.items()}
    record: dict[str, Any] = {
        "uid": prompt.uid,
        "prompt": prompt.text,
        "question": last_user_message(prompt),
        "response": response_text(completions, sample),
        "reward": float(rewards.total[sample]) if rewards.valid[sample] else None,
        "rewards": {name: None if math.isnan(value) else value for name, value in per_function.items()},
        "length": int(completions.offsets[sample + 1] - completions.offsets[sample]),
        "finished": bool(completions.finished[sample]),
        "ground_truth": prompt.ground_truth,
        "source": prompt.source,
    }
    if prompt.images is not None:
        record["images"] = images(prompt.images.all_thumbnails)
    if seen := observed_images(completions, sample):
        record["observed_images"] = images(thumbnails_of(seen))
    if rewards.extras:
        record["extras"] = rewards.extras[sample]
    outcome = completions.outcome_of_each[sample]
    if outcome:
        record["outcome"] = outcome
    here = slice(int(completions.offsets[sample]), int(completions.offsets[sample + 1]))
    mask = [True] * record["length"] if completions.loss_mask is None else completions.loss_mask[here].tolist()
    if outcome or not all(mask):
        record |= {"tokens": completions.tokens[here].tolist(), "sampled": _runs(mask)}
    starts = [] if completions.row_starts is None else completions.row_starts[here].tolist()
    rows = [[token, kept] for token, kept in enumerate(starts) if kept != NO_ROW]
    if rows:
        record["rows"] = rows
    return record


def _runs(mask: Sequence[bool]) -> list[list[int]]:
    """Return start and stop of each run of True."""
    padded = [False, *mask, False]
    changes = [place for place, (before, after) in enumerate(pairwise(padded)) if before != after]
    return [[*pair] for pair in zip(changes[::2], changes[1::2], strict=True)]


def dropped_records(batch: PromptBatch, completions: Completions) -> Iterator[dict[str, Any]]:
    """Yield a record of each group that was dropped for being late, like `sample_record`; `dropped` is the reason.

    Its `images` are thumbnails (`Thumbnail.to_json`), which `step_records` writes on the rank that logs.

    Args:
        batch: the G prompts.
        completions: their S responses.
    """
    for index, reason in completions.dropped.items():
        prompt = batch.prompts[index]
        yield {
            "uid": prompt.uid,
            "prompt": prompt.text,
            "question": last_user_message(prompt),
            "response": None,
            "reward": None,
            "rewards": {},
            "length": 0,
            "finished": False,
            "ground_truth": prompt.ground_truth,
            "source": prompt.source,
            "dropped": reason,
            **({} if prompt.images is None else {"images": [each.to_json() for each in prompt.images.all_thumbnails]}),
        }


def step_records(
    step: int,
    batch: PromptBatch,
    completions: Completions,
    rewards: Rewards,
    advantages_S: torch.Tensor,
    dropped: Sequence[Mapping[str, Any]] = (),
    *,
    most: int | None = None,
    images: MakeRecords = without_files,
) -> Iterator[dict[str, Any]]:
    """Yield the samples of a step, each as `sample_record` with `step` and `advantage`, then its dropped groups.

    Args:
        step: step number.
        batch: the G prompts.
        completions: their S responses.
        rewards: [S] rewards.
        advantages_S: [S] advantages.
        dropped: `dropped_records`.
        most: maximum number of samples, complete groups first; None: all.
        images: as for `sample_record`.
    """
    for i in complete_groups_first(completions.prompt_index.tolist(), len(completions) if most is None else most):
        record = sample_record(i, batch, completions, rewards, images)
        yield {"step": step, **record, "advantage": float(advantages_S[i])}
    for record in dropped:  # of all ranks
        shown = {"images": images([*map(Thumbnail.from_json, record["images"])])} if "images" in record else {}
        yield {"step": step, **record, **shown, "advantage": None}


class CompletionsLog:
    """Appends samples to `run_dir/completions.jsonl`, with thumbnails of their images in `run_dir/images`.

    Args:
        run_dir: folder of the run.
        per_step: maximum number of samples per step; complete groups first.
        most_images: maximum number of thumbnails; 0 writes none.
    """

    def __init__(self, run_dir: Path, per_step: int, most_images: int = 0) -> None:
        self._lines = StepLines(run_dir / FILE)
        self._per_step = per_step
        self._images = LoggedImages(run_dir / FOLDER, most_images)

    def log(
        self,
        step: int,
        batch: PromptBatch,
        completions: Completions,
        rewards: Rewards,
        advantages_S: torch.Tensor,
        dropped: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Append the records of a step's chosen samples and dropped groups."""
        samples = step, batch, completions, rewards, advantages_S, dropped
        for record in step_records(*samples, most=self._per_step, images=self._images.records):
            self._lines.append(record)

    def cut_back(self, step: int) -> None:
        """Remove the samples of every later step, and the thumbnails that only they have."""
        self._lines.cut_back(step)
        self._images.remove_others(read_lines(self._lines.path))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
