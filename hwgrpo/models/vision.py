"""Vision-language models: the parts of a tower, what they read besides tokens, and images that are encoded once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hwgrpo.errors import DataError
from hwgrpo.models.lm_head import backbone, causal_lm
from hwgrpo.values import PromptImages

PROJECTORS = (
    "visual.merger",
    "visual.deepstack_merger_list",
    "multi_modal_projector",
    "connector",
    "mm_projector",
    "embed_vision",
    "image_newline",
)
"""Modules, below the backbone, that map a tower's states to the text model's."""
TOWERS = ("visual", "vision_tower", "vision_model")
TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments of a backbone that are 1 at the tokens of images: some models attend both ways among them."""
BANNED = -1e9
"""Logit of tokens that stand for images: a response has none."""


def reads_images(config: Any) -> bool:
    """Return whether a model of this configuration reads images."""
    return getattr(config, "vision_config", None) is not None and isinstance(
        getattr(config, "image_token_id", None), int
    )


def placeholder_ids(config: Any) -> list[int]:
    """Return the tokens that stand for images, video and sound, which no response may have."""
    names = ("image_token_id", "video_token_id", "audio_token_id")
    values = (getattr(config, name, None) for name in names)
    vocab = config.get_text_config().vocab_size
    return sorted({value for value in values if isinstance(value, int) and 0 <= value < vocab})


def uses_axes(config: Any) -> bool:
    """Return whether tokens have positions in time, height and width."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return "mrope_section" in rope


def vision_parameters(model: Any) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Yield the part ("tower" or "projector"), the name and the parameter of what a text model does not have."""
    for name, parameter in backbone(causal_lm(model)).named_parameters():
        if name.startswith(PROJECTORS):
            yield "projector", name, parameter
        elif name.startswith(TOWERS):
            yield "tower", name, parameter


@dataclass(frozen=True)
class Features:
    """The features of one prompt's images."""

    images: tuple[torch.Tensor, ...]
    """[tokens, H] of each image."""
    deepstack: tuple[tuple[torch.Tensor, ...], ...]
    """The same of each layer of the text model that adds features of its own (Qwen3-VL)."""
    stacked: bool
    """Whether the model wants them as one tensor [images, tokens, H]."""


class ImageEncoder:
    """Encodes the images of prompts by a model's tower, each prompt once as long as nothing in it is trained.

    Args:
        model: a vision-language model, or one wrapped by peft.
    """

    def __init__(self, model: Any) -> None:
        base = causal_lm(model)
        self._model = model
        self.token_id: int = base.config.image_token_id
        self.uses_axes = uses_axes(base.config)
        module = backbone(base)
        self._accepted = inspect.signature(module.get_image_features).parameters
        forward = inspect.signature(module.forward).parameters
        self._types = next((name for name in TYPES if name in forward and not self.uses_axes), None)
        self._known: WeakKeyDictionary[PromptImages, tuple[Any, Features]] = WeakKeyDictionary()
        self.encoded = self.moved_bytes = 0
        """Prompts whose images were encoded, and bytes of pixels moved for them."""

    def inputs(self, input_ids: torch.Tensor, images: Sequence[PromptImages]) -> dict[str, Any]:
        """Return arguments of the model's forward for rows with images, besides tokens and positions.

        Args:
            input_ids: [B, L] int64.
            images: of the prompts in the rows, in the order of the rows; one that stands there several times is encoded
                once.

        Raises:
            DataError: tokens and features of images do not match.
        """
        options: dict[str, Any] = {}
        if self._types is not None:
            options[self._types] = (input_ids == self.token_id).long()
        placed = int((input_ids == self.token_id).sum()) if input_ids.device.type == "cpu" else None
        if images:
            features = self._features(images, input_ids.device)
            options["mm_encoder_outputs"] = {"image": _joined(features)}
            wanted = sum(len(each) for one in features for each in one.images)
        else:
            wanted = 0
        if placed is not None and placed != wanted:
            raise DataError(f"{placed} tokens stand for parts of images, and the images have {wanted}")
        return options

    def _features(self, images: Sequence[PromptImages], device: torch.device) -> list[Features]:
        trains = torch.is_grad_enabled() and any(p.requires_grad for _, _, p in vision_parameters(self._model))
        now: dict[int, Features] = {}
        for each in images:
            if id(each) not in now:
                now[id(each)] = self._encode(each, device) if trains else self._remembered(each, device)
        return [now[id(each)] for each in images]

    def _remembered(self, images: PromptImages, device: torch.device) -> Features:
        """Return features that were encoded before, where the same weights and dtype would encode them again."""
        state = (torch.is_autocast_enabled(device.type), sum(p._version for _, _, p in vision_parameters(self._model)))
        known = self._known.get(images)
        if known is None or known[0] != state:
            with torch.no_grad():
                known = state, self._encode(images, device)
            self._known[images] = known
        return known[1]

    def _encode(self, images: PromptImages, device: torch.device) -> Features:
        inputs = {name: tensor.to(device) for name, tensor in images.inputs.items() if name in self._accepted}
        self.encoded += 1
        self.moved_bytes += sum(tensor.nbytes for tensor in inputs.values())
        made = backbone(causal_lm(self._model)).get_image_features(**inputs, return_dict=True)
        pooled = made.pooler_output
        layers = getattr(made, "deepstack_features", None) or ()
        return Features(tuple(pooled), tuple(tuple(layer) for layer in layers), isinstance(pooled, torch.Tensor))


def _joined(features: Sequence[Features]) -> Any:
    """Return what a model's forward takes as the encoder's output, in the order of rows."""
    images = [each for one in features for each in one.images]
    deepstack = [
        [each for one in features for each in one.deepstack[layer]] for layer in range(len(features[0].deepstack))
    ]
    return SimpleNamespace(
        pooler_output=torch.stack(images) if features[0].stacked else images, deepstack_features=deepstack
    )
