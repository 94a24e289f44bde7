"""Text and images -> the tokens of a prompt and what the model's tower reads, by the model's own processors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jinja2 import TemplateError

from hwgrpo.data.media import MARK
from hwgrpo.data.thumbnails import make_thumbnail
from hwgrpo.errors import ConfigError, DataError, error_text, quoted
from hwgrpo.values import PromptImages

OTHER_TEMPLATE = "set model.chat_template to a file with a template that shows images"
SAMPLE_SIDE = 56
"""Pixels of a side of the image of startup checks."""
TOKENS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""What a processor returns of the text, which the trainer makes itself."""


@dataclass(frozen=True)
class Grids:
    """How the tokens of an image stand in a grid, for families that give them positions in height and width."""

    name: str
    """The processor's output [images, 3] with the patches in time, height and width."""
    merged: int
    """Patches of a side that become one token."""

    def sizes(self, inputs: Mapping[str, torch.Tensor]) -> list[tuple[int, int]]:
        """Return the tokens of each image in height and width."""
        grids = inputs[self.name].tolist()
        return [(height // self.merged, width // self.merged) for _, height, width in grids]


def image_axes(token_ids: Sequence[int], token_id: int, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return [P, 3] int64: positions of a prompt's tokens in time, height and width (Qwen2-VL, arXiv 2409.12191, 2.1).

    The tokens of an image of h x w begin at the next position p: all at p in time, at p + row and p + column in the
    other two. What follows goes on after the largest of them.

    Args:
        token_ids: of P tokens.
        token_id: stands for a part of an image.
        grids: tokens of each image in height and width, in the order of the prompt.
    """
    axes: list[tuple[int, int, int]] = []
    position, place, remaining = 0, 0, iter(grids)
    while place < len(token_ids):
        if token_ids[place] != token_id:
            axes.append((position, position, position))
            position, place = position + 1, place + 1
            continue
        height, width = next(remaining)
        axes += [(position, position + row, position + column) for row in range(height) for column in range(width)]
        position, place = position + max(height, width), place + height * width
    return torch.tensor(axes, dtype=torch.int64).view(-1, 3)


@dataclass(frozen=True)
class ImagePrompts:
    """What makes the tokens of prompts with images, and what the model's tower reads.

    Texts are those of the chat template, with the mark of an image where it stands.
    """

    process: Callable[[str, Sequence[Any]], tuple[list[int], Mapping[str, torch.Tensor]]]
    """(text, images) -> token ids, in which every image has its tokens, and the processor's other outputs."""
    render: Callable[[], str]
    """Returns the text of a prompt with one image."""
    token_id: int
    """Stands for a part of an image."""
    grids: Grids | None
    """None: the model counts tokens."""
    marks: frozenset[str] = frozenset()
    """Texts of tokens that show images, video or sound: a message that has one would show what is not there."""
    mark: str = ""
    """Text of `token_id`; "": not known."""

    @cached_property
    def marks_of_one(self) -> Mapping[str, int]:
        """How often the chat template writes each mark for one image.

        Raises:
            ConfigError: the template writes none.
        """
        try:
            text = self.render()
        except (ValueError, TemplateError) as error:  # no chat template, or one of text
            raise ConfigError(
                f"the chat template shows no images ({error_text(error, 200)}); {OTHER_TEMPLATE}"
            ) from error
        counts = {mark: text.count(mark) for mark in self.marks}
        if not any(counts.values()):
            raise ConfigError(f"the chat template writes none of {', '.join(sorted(self.marks))}; {OTHER_TEMPLATE}")
        return counts

    def check_marks(self, text: str, images: int, place: str) -> None:
        """Check that a prompt's text marks as many images as it has.

        Args:
            text: after the chat template.
            images: number of images.
            place: file and row, for messages.

        Raises:
            ConfigError: the chat template shows no images.
            DataError: another number of marks; placeholders without pixels would be embedded as text.
        """
        for mark in sorted(self.marks):
            wanted = images * self.marks_of_one[mark] if images else 0
            if text.count(mark) != wanted:
                raise DataError(
                    f"{place}: the prompt has {images} images, and its text has {mark} {text.count(mark)} times "
                    f"instead of {wanted}; take it out of data.system_prompt, few_shot and instruction, or "
                    f"{OTHER_TEMPLATE}"
                )

    def encode(
        self, text: str, images: Sequence[Any], place: str, *, thumbnails: bool = True
    ) -> tuple[list[int], PromptImages]:
        """Return a prompt's tokens and images.

        Args:
            text: after the chat template.
            images: PIL images in RGB, in the order of the text; at least one.
            place: file and row, for messages.
            thumbnails: whether small copies of them are made, for logs.

        Raises:
            DataError: text and images do not match, or the processor refuses an image.
        """
        try:
            ids, inputs = self.process(text, images)
        except (ValueError, IndexError, StopIteration, RuntimeError) as error:
            raise DataError(
                f"{place}: the model's image processor refuses the prompt {quoted(text, 80)} with {len(images)} images "
                f"({error_text(error, 200)}); change the image, or leave out the row"
            ) from error
        axes, placed = None, ids.count(self.token_id)
        tokens = [placed // len(images) + (number < placed % len(images)) for number in range(len(images))]
        if self.grids is not None:
            sizes = self.grids.sizes(inputs)
            tokens = [height * width for height, width in sizes]
            wanted = sum(tokens)
            if placed != wanted:
                raise DataError(f"{place}: {len(images)} images have {wanted} tokens, and the prompt has {placed}")
            axes = image_axes(ids, self.token_id, sizes)
        small = tuple(map(make_thumbnail, images)) if thumbnails else ()
        made = PromptImages(
            inputs, _digest(inputs), self.token_id, axes, thumbnails=small, mark=self.mark, tokens=tuple(tokens)
        )
        return ids, made

    def sample(self) -> tuple[list[int], PromptImages]:
        """Return a prompt with an image of noise, for startup checks."""
        from PIL import Image

        pixels = torch.randint(0, 256, (SAMPLE_SIDE, SAMPLE_SIDE, 3), generator=torch.Generator().manual_seed(0))
        image = Image.fromarray(pixels.to(torch.uint8).numpy())
        return self.encode(self.render(), [image], "startup check", thumbnails=False)


def _digest(inputs: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(inputs):
        tensor = inputs[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def expand_marks(ids: Sequence[int], token_id: int, counts: Sequence[int]) -> list[int]:
    """Return token ids in which each mark of an image is repeated for each of its tokens.

    Args:
        ids: with one `token_id` per image.
        token_id: the mark, and the token.
        counts: tokens of each image.

    Raises:
        ValueError: there are more or fewer marks than images.
    """
    marks = sum(token == token_id for token in ids)
    if marks != len(counts):
        raise ValueError(f"the text has {marks} marks of images")
    remaining = iter(counts)
    return [each for token in ids for each in ([token] * next(remaining) if token == token_id else [token])]


MARKED = frozenset(
    {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm46v", "glm4v_moe"}
)
"""Model types whose templates mark an image by one token, which is repeated for each of its tokens; their processors
need torchvision, their image processors do not (transformers 5.19)."""
ONE_IMAGE = ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},)


def load_image_prompts(path: str, revision: str | None, config: Any, tokenizer: Any) -> ImagePrompts | None:
    """Return what makes prompts with images for a model; None where it reads text alone.

    Args:
        path: the model's folder or hub name.
        revision: of the hub.
        config: the model's configuration.
        tokenizer: the model's.

    Raises:
        ConfigError: the model reads images, and its processor is missing or cannot be used here.
    """
    token_id = getattr(config, "image_token_id", None)
    if not isinstance(token_id, int) or getattr(config, "vision_config", None) is None:
        return None

    def render() -> str:
        return tokenizer.apply_chat_template(list(ONE_IMAGE), tokenize=False, add_generation_prompt=True)

    if config.model_type in MARKED:
        return by_marks(_processor("AutoImageProcessor", path, revision), render, token_id, config, tokenizer)
    processor = _processor("AutoProcessor", path, revision)

    def process(text: str, images: Sequence[Any]) -> tuple[list[int], Mapping[str, torch.Tensor]]:
        made = processor(text=[text], images=[list(images)], return_tensors="pt", add_special_tokens=False)
        return made["input_ids"][0].tolist(), {name: made[name] for name in made if name not in TOKENS}

    marks = marks_of(config, tokenizer, processor)
    return ImagePrompts(process, render, token_id, None, marks, _mark(token_id, tokenizer))


def _mark(token_id: int, tokenizer: Any) -> str:
    return tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < len(tokenizer) else ""


PLACEHOLDERS = tuple(
    f"{kind}_{field}"
    for kind in ("image", "video", "audio", "vision_start", "vision_end", "image_start", "image_end", "boi", "eoi")
    for field in ("token_id", "token_index")
)
"""Fields of configurations with tokens that show images, video or sound."""


def marks_of(config: Any, tokenizer: Any, processor: Any = None) -> frozenset[str]:
    """Return the texts of a model's tokens that show images, video or sound.

    Args:
        config: the model's configuration.
        tokenizer: the model's.
        processor: the model's, with names of such tokens of its own.
    """
    ids = [value for name in PLACEHOLDERS if isinstance(value := getattr(config, name, None), int)]
    texts = [tokenizer.convert_ids_to_tokens(value) for value in ids if 0 <= value < len(tokenizer)]
    texts += [getattr(processor, name, None) for name in ("image_token", "boi_token", "video_token", "audio_token")]
    texts += [text for text in tokenizer.get_added_vocab() if MARK.fullmatch(text)]
    return frozenset(text for text in texts if isinstance(text, str) and text)


def by_marks(processor: Any, render: Callable[[], str], token_id: int, config: Any, tokenizer: Any) -> ImagePrompts:
    """Return what makes prompts for a model that marks each image by one token, by its image processor alone."""
    merged = config.vision_config.spatial_merge_size
    grids = Grids("image_grid_thw", merged)

    def process(text: str, images: Sequence[Any]) -> tuple[list[int], Mapping[str, torch.Tensor]]:
        made = dict(processor(images=list(images), return_tensors="pt"))
        counts = [height * width for height, width in grids.sizes(made)]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return expand_marks(ids, token_id, counts), made

    return ImagePrompts(process, render, token_id, grids, marks_of(config, tokenizer), _mark(token_id, tokenizer))


def _processor(kind: str, path: str, revision: str | None) -> Any:
    """Return a model's processor of transformers' class `kind`."""
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(path, revision=revision)
    except (OSError, ValueError, ImportError, AttributeError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        missing = (
            "; it needs torchvision, in the build that fits this torch (`pip install torchvision --index-url` with "
            "the index of torch)"
            if "torchvision" in str(error) or isinstance(error, AttributeError)
            else ": copy preprocessor_config.json into its folder"
        )
        raise ConfigError(
            f"model.path={path!r} reads images, and its image processor cannot be loaded: {reason}{missing}"
        ) from error
