"""Vision-language models: the parts of a tower, what they read besides tokens, and images that are encoded once."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, count
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers

from hwgrpo.errors import ConfigError, DataError
from hwgrpo.models.lm_head import backbone, causal_lm
from hwgrpo.models.placeholders import reads_images
from hwgrpo.values import Prompt, PromptImages

THREE_AXES = frozenset(
    {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm46v", "glm4v_moe"}
)
"""Model types whose tokens have positions in time, height and width."""
ONE_AXIS = frozenset(
    {
        "gemma3",
        "gemma4",
        "idefics3",
        "internvl",
        "kimi_k25",
        "lfm2_vl",
        "llava",
        "llava_onevision",
        "mistral3",
        "smolvlm",
    }
)
"""Model types that count tokens of images as those of text. Each type of both sets is compared with transformers by
tests/models/test_vision_families.py."""
CROSS_ATTENTION = "its text model reads images by cross-attention, and not in the place of tokens"
UNSUPPORTED = {
    "florence2": "it has an encoder and a decoder of text",
    "gemma3n": "its tower is one of timm's, which needs torchvision",
    "idefics": CROSS_ATTENTION,
    "llama4": "its forward does not take images that are encoded once for all responses to a prompt",
    "mllama": CROSS_ATTENTION,
    "paligemma": "the tokens of a prompt attend to each other both ways, which packed rows and cached decoding do not",
}
"""Model type -> why it cannot be trained with images."""

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
OTHER = "other"
"""The part of a model that is neither its text model nor sees images: what Gemma 4 reads sound with."""
TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments of a backbone that are 1 at the tokens of images: some models attend both ways among them."""


def uses_axes(config: Any) -> bool:
    """Return whether tokens have positions in time, height and width."""
    return config.model_type in THREE_AXES


def attends_both_ways(config: Any) -> bool:
    """Return whether the tokens of an image attend to those after them in it."""
    attention = getattr(config.get_text_config(), "use_bidirectional_attention", None)
    return reads_images(config) and (config.model_type == "gemma3" or attention == "vision")


def unsupported_reason(config: Any) -> str | None:
    """Return why a model of this configuration cannot be trained with images; None where it can, or reads none."""
    kind = config.model_type
    if kind in THREE_AXES | ONE_AXIS or (getattr(config, "vision_config", None) is None and kind not in UNSUPPORTED):
        return None
    return UNSUPPORTED.get(kind, f"models of the type {kind} have not been compared with transformers")


def vision_modules(model: Any, parts: str) -> set[torch.nn.Module]:
    """Return the modules of the parts ("none", "projector" or "all") of a vision-language model that see images."""
    if parts == "none":
        return set()
    names = PROJECTORS if parts == "projector" else (*PROJECTORS, *TOWERS)
    return {
        module
        for name, module in backbone(causal_lm(model)).named_modules()
        if any(name == each or name.startswith(f"{each}.") for each in names)
    }


def freeze_vision(model: Any, trained: str) -> None:
    """Freeze the tower and projector of a vision-language model but for the parts that are trained.

    Parts that no image passes, as a tower of sound, never train: they would get no gradient.
    """
    for part, _, parameter in vision_parameters(model):
        parameter.requires_grad_(part != OTHER and trained in ("all", part))


def vision_parameters(model: Any) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Yield the part ("tower", "projector" or OTHER), the name and the parameter of what a text model does not have."""
    base = causal_lm(model)
    of_text = {id(each) for each in base.get_decoder().parameters()} if reads_images(base.config) else None
    for name, parameter in backbone(base).named_parameters():
        if name.startswith(PROJECTORS):
            yield "projector", name, parameter
        elif name.startswith(TOWERS):
            yield "tower", name, parameter
        elif of_text is not None and id(parameter) not in of_text:
            yield OTHER, name, parameter


def is_vision_name(name: str) -> bool:
    """Return whether a weight of this name in a checkpoint is of a tower or projector."""
    return any(f".{each}." in f".{name}." for each in (*TOWERS, *PROJECTORS))


@dataclass(frozen=True)
class Features:
    """The features of one prompt's images."""

    images: tuple[torch.Tensor, ...]
    """[tokens, H] of each image."""
    deepstack: tuple[tuple[torch.Tensor, ...], ...]
    """The same of each layer of the text model that adds features of its own (Qwen3-VL)."""
    stacked: bool
    """Whether the model wants them as one tensor [images, tokens, H]."""

    @property
    def nbytes(self) -> int:
        """Bytes of all features."""
        return sum(each.nbytes for each in (*self.images, *(each for layer in self.deepstack for each in layer)))


MOST_REMEMBERED = 2**30
"""Bytes of features that a process remembers, of all its encoders."""


class RememberedFeatures:
    """The features that were used last, of all encoders of a process, whose threads may use them at the same time.

    Args:
        most: bytes; the features that were used last of all are kept also beyond them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[tuple[Any, ...], Features] = OrderedDict()
        self._forgotten: deque[Any] = deque()
        self._lock = threading.Lock()

    def get(self, key: tuple[Any, ...]) -> Features | None:
        """Return the features of a key; None: they are not known."""
        with self._lock:
            self._drop_forgotten()
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def put(self, key: tuple[Any, ...], features: Features) -> None:
        """Remember features, and forget those that were not used for longest where there are too many."""
        with self._lock:
            self._drop_forgotten()
            self._known[key] = features
            while len(self._known) > 1 and sum(each.nbytes for each in self._known.values()) > self._most:
                self._known.popitem(last=False)

    def forget(self, first: Any) -> None:
        """Forget the features of all keys that begin with a value.

        The garbage collector calls it, also in a thread that is in one of the other methods: it does not wait.
        """
        self._forgotten.append(first)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_forgotten()
            finally:
                self._lock.release()

    def _drop_forgotten(self) -> None:
        """Drop what `forget` was called with; the caller holds the lock."""
        while self._forgotten:
            first = self._forgotten.popleft()
            for key in [key for key in self._known if key[0] == first]:
                del self._known[key]


REMEMBERED = RememberedFeatures(MOST_REMEMBERED)
_NUMBERS = count()
"""Numbers of encoders."""


class ImageEncoder:
    """Encodes the images of prompts by a model's tower: once per call; where nothing in it is trained, once per prompt.

    Args:
        model: a vision-language model, or one wrapped by peft.

    Raises:
        ConfigError: this transformers cannot be given encoded images.
    """

    def __init__(self, model: Any) -> None:
        base = causal_lm(model)
        self._model = model
        self.token_id: int = base.config.image_token_id
        self.uses_axes = uses_axes(base.config)
        module: Any = backbone(base)
        forward = inspect.signature(module.forward).parameters
        if "mm_encoder_outputs" not in forward:
            raise ConfigError(
                f"{type(base).__name__} does not take encoded images (mm_encoder_outputs) in transformers "
                f"{transformers.__version__}: install transformers 5.19 or later"
            )
        self._accepted = inspect.signature(module.get_image_features).parameters
        self._types = next((name for name in TYPES if name in forward and not self.uses_axes), None)
        self._number = next(_NUMBERS)
        weakref.finalize(self, REMEMBERED.forget, self._number).atexit = False
        self.sample: Prompt | None = None
        """A prompt with an image, for startup checks."""
        self.encoded = self.moved_bytes = 0
        """Prompts whose images were encoded, and bytes of pixels moved for them."""

    @property
    def trains(self) -> bool:
        """Whether a part of the tower or the projector is trained."""
        return any(parameter.requires_grad for _, _, parameter in vision_parameters(self._model))

    def inputs(self, input_ids: torch.Tensor, images: Sequence[PromptImages]) -> dict[str, Any]:
        """Return arguments of the model's forward for rows with images, besides tokens and positions.

        Args:
            input_ids: [B, L] int64.
            images: of the prompts in the rows, in the order of the rows; one that stands there several times is encoded
                once.

        Raises:
            DataError: tokens and features of images do not match (one model does not compare them, and others raise
                what names no prompt).
        """
        options: dict[str, Any] = {}
        places = input_ids == self.token_id
        if self._types is not None:
            options[self._types] = places.long()
        features = self._features([part for each in images for part in each.parts], input_ids.device)
        if images or input_ids.device.type == "cpu":  # reading the count waits for an accelerator
            _check_counts(places.sum(dim=1).tolist(), [sum(len(each) for each in one.images) for one in features])
        if images:
            options["mm_encoder_outputs"] = {"image": _joined(features)}
        return options

    def unused(self, device: torch.device) -> torch.Tensor:
        """Return 0 as a function of all parameters that see images: for ranks whose micro-batch has none."""
        assert self.sample is not None
        assert self.sample.images is not None
        features = self._encode(self.sample.images, device)
        every = (*features.images, *(each for layer in features.deepstack for each in layer))
        return 0.0 * torch.stack([each.sum() for each in every]).sum()

    def _features(self, images: Sequence[PromptImages], device: torch.device) -> list[Features]:
        trains = self.trains  # fused optimizers do not count their writes, so nothing is known of when they change
        now: dict[str, Features] = {}
        for each in images:
            if each.digest not in now:
                now[each.digest] = self._encode(each, device) if trains else self._remembered(each, device)
        return [now[each.digest] for each in images]

    def _remembered(self, images: PromptImages, device: torch.device) -> Features:
        """Return features that were encoded before, where the same weights and dtype would encode them again."""
        versions = sum(parameter._version for _, _, parameter in vision_parameters(self._model))
        key = (self._number, images.digest, device, torch.is_autocast_enabled(device.type), versions)
        features = REMEMBERED.get(key)
        if features is None:
            with torch.no_grad():
                features = self._encode(images, device)
            REMEMBERED.put(key, features)
        return features

    def _encode(self, images: PromptImages, device: torch.device) -> Features:
        moved = _moved(self._model, images, device)
        inputs = {name: tensor for name, tensor in moved.items() if name in self._accepted}
        self.encoded += 1
        self.moved_bytes += sum(tensor.nbytes for tensor in inputs.values())
        module: Any = backbone(causal_lm(self._model))
        made = module.get_image_features(**inputs, return_dict=True)
        pooled = made.pooler_output
        layers = getattr(made, "deepstack_features", None) or ()
        return Features(tuple(pooled), tuple(tuple(layer) for layer in layers), isinstance(pooled, torch.Tensor))


_ENCODERS: WeakKeyDictionary[torch.nn.Module, ImageEncoder] = WeakKeyDictionary()


def image_encoder(model: Any) -> ImageEncoder | None:
    """Return the encoder of a model, one for all that run it; None where it reads text alone."""
    base = causal_lm(model)
    if not reads_images(base.config):
        return None
    if base not in _ENCODERS:
        _ENCODERS[base] = ImageEncoder(weakref.proxy(base))
    return _ENCODERS[base]


@torch.no_grad()
def own_logits(model: Any, tokens: Sequence[int], images: PromptImages) -> torch.Tensor:
    """Return the logits [L, V] that a vision-language model computes itself of a sequence with images.

    It reads pixels and makes positions, as with the outputs of its processor.

    Args:
        model: in evaluation mode, on its device.
        tokens: of the sequence.
        images: that it shows.
    """
    base = causal_lm(model)
    ids = torch.tensor([list(tokens)], device=next(base.parameters()).device)
    with own_inputs(base, ids, images) as options:
        return base(input_ids=ids, use_cache=False, **options).logits[0]


@contextmanager
def own_inputs(model: Any, ids: torch.Tensor, images: PromptImages | None) -> Iterator[dict[str, Any]]:
    """Yield what a model's own forward takes besides token ids; nothing where it reads text alone.

    Args:
        model: a transformers causal LM.
        ids: [B, L] int64, on its device.
        images: that the only row shows; None: the rows are text.
    """
    if not reads_images(model.config):
        yield {}
        return
    module: Any = backbone(model)
    forward = inspect.signature(module.forward).parameters
    options: dict[str, Any] = {name: (ids == model.config.image_token_id).long() for name in TYPES if name in forward}
    if images is not None:
        options |= _moved(model, images, ids.device)
    if hasattr(module, "rope_deltas"):
        module.rope_deltas = None  # of an earlier call
    try:
        yield options
    finally:
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None  # else this rank's module has a tensor that others do not have


def _moved(model: Any, images: PromptImages, device: torch.device) -> dict[str, torch.Tensor]:
    """Return images on a device, pixels in the dtype of the tower: not every tower converts them."""
    dtype = next((p.dtype for _, _, p in vision_parameters(model) if p.is_floating_point()), None)
    return {
        name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in images.inputs.items()
    }


def _check_counts(placed: Sequence[int], wanted: Sequence[int]) -> None:
    """Compare tokens of images in each row with the features of each prompt, in the same order.

    A row has the images of one or several prompts, so each row ends where a prompt's features do.

    Raises:
        DataError: they differ.
    """
    ends = {0, *accumulate(wanted)}
    if sum(placed) != sum(wanted) or not ends.issuperset(accumulate(placed)):
        raise DataError(
            f"{list(placed)} tokens of the rows stand for parts of images, and the images of prompts have "
            f"{list(wanted)}: the prompts' tokens are not those that the model's processor makes of these images"
        )


def _joined(features: Sequence[Features]) -> Any:
    """Return what a model's forward takes as the encoder's output, in the order of rows."""
    images = [each for one in features for each in one.images]
    deepstack = [
        [each for one in features for each in one.deepstack[layer]] for layer in range(len(features[0].deepstack))
    ]
    return SimpleNamespace(
        pooler_output=torch.stack(images) if features[0].stacked else images, deepstack_features=deepstack
    )
