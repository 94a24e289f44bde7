"""Runs of vision-language families on prompts with images: one rank and two, in one go and resumed."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
import torch.distributed as dist
from hwgrpo_backends.cpu import BACKEND
from PIL import Image
from safetensors.torch import load_file

from hwgrpo.data.image_prompts import ONE_IMAGE, Grids, ImagePrompts
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.finish import finish
from hwgrpo.training.loop import train
from hwgrpo.training.setup import build_run
from tests.support.models.families import TOKENIZER
from tests.support.models.vision_families import END, IMAGE, START, VIDEO, VISION_FAMILIES, model_of
from tests.support.numbers.rounding import GENTLE, PROBE, gaps
from tests.support.processes.ranks import forked
from tests.support.runs import runs

STEPS, SAVED = 3, 2
"""Steps of a run, and the one whose checkpoint another goes on with."""
MARKS = [str(TOKENIZER.decode([token])) for token in (START, IMAGE, END, VIDEO)]
SHOWN = "".join(MARKS[:3])
"""What the chat template writes for an image."""
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}" + SHOWN + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
REWARD = """
def letters(completions, **columns):
    return [float(sum(map(ord, one[0]["content"][:3])) % 7) for one in completions]
"""
RUN = (
    "data.max_prompt_tokens=200",
    "data.max_rows=8",
    "data.validation_max_rows=256",
    "trainer.validation_n=4",
    "trainer.validate_every=0",
    "trainer.prompts_per_step=4",
    "trainer.save_every=1",
    f"trainer.max_steps={STEPS}",
    "rollout.max_response_tokens=6",
    "rollout.n=3",
    "model.train_vision=all",
    "algorithm.aggregation.name=token-mean",
    *GENTLE,
)


OF_THE_FOLDER = ("config", "template_date", "resumes")
"""Parts of a checkpoint's state with the folder and the starts of the run."""


class Cut(Exception):
    """Ends a run as a crash does."""


def family_settings(name: str, folder: Path) -> tuple[str, ...]:
    """Write a family's model, eight rows of none, one or two images, and a reward; return a run's settings for them."""
    model_of(name).save_pretrained(folder / "model")
    tokenizer = TOKENIZER.__class__(tokenizer_object=TOKENIZER.backend_tokenizer, **TOKENIZER.special_tokens_map)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    lines = []
    for row in range(8):
        names = [f"{row}-{i}.png" for i in range(row % 3)]
        for i, each in enumerate(names):
            Image.new("RGB", (8, 8), (20 * row, 90 * i, 10)).save(folder / each)
        message = {"role": "user", "content": "<image>" * len(names) + f"what is {row}?"}
        lines.append(json.dumps({"prompt": [message], "images": names, "answer": "x"}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    (folder / "rewards.py").write_text(REWARD)
    return (
        f"model.path={folder}/model",
        f"data.train={folder}/rows.jsonl",
        f"reward.functions=['{folder}/rewards.py:letters']",
        *RUN,
    )


@contextmanager
def made_pixels(name: str) -> Iterator[None]:
    """Replace a family's image processor by `VisionFamily.pixels`, with a seed that the images determine."""
    family = VISION_FAMILIES[name]
    gridded = family.prompt(0)[1].axes is not None

    def process(text: str, images: Sequence[Any]) -> tuple[list[int], Mapping[str, torch.Tensor]]:
        seed = zlib.crc32(b"".join(image.tobytes() for image in images))
        made = family.pixels(torch.Generator().manual_seed(seed), len(images))
        rows = iter(made.rows)
        ids: list[int] = []
        for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]:
            if token == IMAGE:
                first, *others = next(rows)
                ids += [IMAGE] * first
                for run in others:
                    ids += [END] + [IMAGE] * run
            else:
                ids.append(token)
        return ids, made.inputs

    def load(path: str, revision: str | None, config: Any, tokenizer: Any) -> ImagePrompts:
        def render() -> str:
            return tokenizer.apply_chat_template(list(ONE_IMAGE), tokenize=False, add_generation_prompt=True)

        return ImagePrompts(process, render, IMAGE, Grids("image_grid_thw", 2) if gridded else None, frozenset(MARKS))

    with patch("hwgrpo.data.image_prompts.load_image_prompts", load):
        yield


def train_saving(output: Path, *words: str, until: int | None = None) -> None:
    """Run to the end, or until a step is saved and end there as if by a crash.

    Before each checkpoint random numbers are drawn, as dropout would, so that its random state is not the seed's.
    """
    run = build_run(runs.small(output, *words), BACKEND, 0, 1)
    plain = run.saver.save

    def save(step: int, **options: Any) -> None:
        torch.rand(1)
        numpy.random.rand()
        random.random()
        plain(step, **options)
        if step == until:
            run.saver.wait()
            raise Cut

    run.saver.save = save
    try:
        finish(run, train(run))
        assert until is None, f"step {until} was never saved"
    except Cut:
        pass
    finally:
        run.close()


def results(output: Path) -> dict[str, Any]:
    """Return what a run leaves: `runs.everything`, and parameters, states and counters of its last checkpoint."""
    folder = checkpoint_files.folder_of(output / "checkpoints", STEPS)
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
    assert any(name.startswith("moments") for name in files)
    assert any(name.startswith("rng") for name in files)
    manifest = json.loads((folder / checkpoint_files.MANIFEST).read_text())
    state = {key: value for key, value in manifest["state"].items() if key not in OF_THE_FOLDER}
    return runs.everything(output) | files | {"parameters": manifest["parameters"], "state": state}


@dataclass(frozen=True)
class ResumeDifference:
    """What of a run differs where it was broken off and resumed, and how far two ranks are from one."""

    one_rank: list[str]
    """Of `results`, what differs; nothing where the run resumes bit for bit."""
    two_ranks: list[str]
    """The same of a run on two ranks."""
    metrics: float
    """Largest difference of a metric of two ranks from one's, as a share of its magnitude, or of 1 if that is less."""
    weights: float
    """By `gaps`: of the final weights of two ranks from one's."""


def resume_differences(
    names: Collection[str], folder: Path, *, strategy: str = "fsdp2", limit_s: float = 240
) -> dict[str, ResumeDifference]:
    """Run families in one go and resumed, on one rank, and in one launch of two.

    Args:
        names: of the families.
        folder: an empty one.
        strategy: of the two ranks.
        limit_s: seconds after which the processes are killed.
    """
    words = {}
    for number, name in enumerate(names):
        (folder / str(number)).mkdir()
        words[name] = family_settings(name, folder / str(number))

    def run_all(kind: str, *more: str) -> None:
        for number, name in enumerate(names):
            output = folder / str(number) / kind
            with made_pixels(name):
                train_saving(output / "whole", *words[name], *more)
                train_saving(output / "cut", *words[name], *more, until=SAVED)
                train_saving(output / "cut", *words[name], *more)

    def on_rank(rank: int) -> None:
        dist.init_process_group("gloo")
        run_all("two", f"trainer.strategy={strategy}")
        dist.barrier()  # without families a rank would be gone before the other has connected
        dist.destroy_process_group()

    run_all("one")
    statuses = forked(2, on_rank, limit_s=limit_s)
    assert statuses == [0, 0], statuses
    return {name: _difference(folder / str(number)) for number, name in enumerate(names)}


def _difference(folder: Path) -> ResumeDifference:
    different = []
    for kind in ("one", "two"):
        whole, resumed = results(folder / kind / "whole"), results(folder / kind / "cut")
        different.append(sorted(key for key in whole.keys() | resumed.keys() if whole.get(key) != resumed.get(key)))
    one, two = (_metrics(folder / kind / "whole") for kind in ("one", "two"))
    assert one.keys() == two.keys(), sorted(one.keys() ^ two.keys())
    far = max(abs(value - one[key]) / max(1.0, abs(one[key])) for key, value in two.items())
    weights = [load_file(next((folder / kind / "whole").glob("final*/*.safetensors"))) for kind in ("two", "one")]
    return ResumeDifference(*different, metrics=far, weights=max(gaps(*weights).values()))


def _metrics(output: Path) -> dict[tuple[int, str], float]:
    """Return the metrics that do not depend on the number of ranks, by step and name."""
    lines = [line for line in runs.metrics(output) if "actor/grad_norm" in line]
    assert len(lines) == STEPS
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    return {
        (line["step"], name): float(value)
        for line in lines
        for name, value in line.items()
        if name != PROBE and isinstance(value, int | float)
    }
