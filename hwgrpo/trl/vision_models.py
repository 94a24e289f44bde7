"""Models that read images: a script's processor, the parts that are trained, and the lengths of prompts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from hwgrpo.config.schema import DataConfig
from hwgrpo.data.given_rows import part_of
from hwgrpo.data.images import ImageReader
from hwgrpo.errors import ConfigError, shown

_KINDS = ("image_processor_type", "processor_class", "feature_extractor_type", "return_tensors", "device", "backend")
"""Fields of an image processor that change no pixels: transformers has it in several classes."""


def tokenizer_of(processor: ProcessorMixin) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a processor, with the processor's chat template.

    Raises:
        ConfigError: it is none of a model that reads images and text.
    """
    tokenizer = getattr(processor, "tokenizer", None)
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or getattr(processor, "image_processor", None) is None:
        raise ConfigError(
            f"processing_class={type(processor).__name__} is a processor without a tokenizer and an image processor; "
            "sound and video are not supported, and for a model of text give its tokenizer"
        )
    template = getattr(processor, "chat_template", None)
    if template and template != tokenizer.chat_template:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
    return tokenizer


def check_image_processor(processor: ProcessorMixin, path: str) -> None:
    """Check that a processor scales images as that in the model's folder, which the run uses.

    Args:
        processor: that of a script.
        path: the model's folder or hub name.

    Raises:
        ConfigError: it does not, with the fields that differ; or the folder has none.
    """
    from transformers import AutoImageProcessor

    given: Any = processor
    try:
        own = AutoImageProcessor.from_pretrained(path).to_dict()
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ConfigError(
            f"processing_class={type(processor).__name__}: model={path!r} has no image processor that can be loaded "
            f"({(str(error).splitlines() or [type(error).__name__])[0]}); save the processor into its folder"
        ) from error
    mine = given.image_processor.to_dict()
    differing = [
        f"{name}={shown(mine[name])} instead of {shown(own[name])}"
        for name in sorted(mine.keys() & own.keys())
        if name not in _KINDS and _plain(mine[name]) != _plain(own[name])
    ]
    if differing:
        raise ConfigError(
            f"processing_class: its image processor has {', '.join(differing)}, and the run uses that of the model's "
            f"folder; save the processor there (save_pretrained), or limit images by their size in the dataset"
        )


def _plain(value: Any) -> Any:
    """Return a value as plain data: sizes are mappings of several classes."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    return list(value) if isinstance(value, list | tuple) else value


def vision_settings(model: Any, *, adapted: bool) -> dict[str, Any]:
    """Return what is trained of the tower and the projector, as in TRL: what requires a gradient, or gets adapters.

    Args:
        model: the object, without adapters; None: it is made by its name, and all of it requires one.
        adapted: whether the run trains adapters, whose target modules PEFT looks for in the tower, too.
    """
    if adapted:
        return {"model.lora.vision": "all"}
    if model is None:
        return {"model.train_vision": "all"}
    from hwgrpo.models.vision import vision_parameters

    trained = {part for part, _, parameter in vision_parameters(model) if parameter.requires_grad}
    return {"model.train_vision": "all" if "tower" in trained else "projector" if "projector" in trained else "none"}


def longest_with_images(datasets: Iterable[Any], tokenizer: Any, template: Mapping[str, Any], images: Any) -> int:
    """Return the tokens of the longest prompt, those of its images included.

    Args:
        datasets: rows with a prompt.
        tokenizer: of the model.
        template: options of the chat template.
        images: the model's `ImagePrompts`.

    Raises:
        ConfigError, DataError: as a run that reads these rows.
    """
    from hwgrpo.data.chat_template import render
    from hwgrpo.data.sources import Rows

    config = DataConfig(train="", chat_template_kwargs=dict(template))
    reader, longest = ImageReader(config.images), 1
    for dataset in datasets:
        rows = Rows([part_of(dataset, "the dataset", "train_dataset")])
        for number in range(len(rows)):
            row = render(rows, number, config, tokenizer, images)
            if row.sources:
                read = reader.read_all(row.sources, rows.folder(number), rows.place(number))
                ids, _ = images.encode(row.text, [each.image for each in read], rows.place(number))
            else:
                ids = tokenizer(row.text, add_special_tokens=not row.templated)["input_ids"]
            longest = max(longest, len(ids))
    return longest
