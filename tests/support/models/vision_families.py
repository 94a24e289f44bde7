"""Vision-language families as tiny random models, prompts with images, and log-probs by plain transformers.

No processor is needed: `VisionFamily.prompt` makes the tensors that a family's image processor would return, and a
prompt with the tokens that stand for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers

from hwgrpo.data.image_prompts import image_axes
from hwgrpo.models.lm_head import backbone
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.models.vision import ImageEncoder
from hwgrpo.values import PromptImages, text_axes

VOCAB = len(character_tokenizer(""))
IMAGE, VIDEO, START, END = range(VOCAB - 4, VOCAB)
"""Tokens that stand for images and video, and those around an image."""
TEXT_TOKENS = range(5, 90)
SIDE, PATCH = 16, 4
"""Pixels of an image's side where a family has one size, and of a patch."""

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = ROUTED | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
ALTERNATING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": MROPE | {"partial_rotary_factor": 0.5},
}
TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GRID_TOWER: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": PATCH,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
SIGLIP = TOWER | {"model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": PATCH,
                  "vision_use_head": False}  # fmt: skip
MARKS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
QWEN_MARKS = MARKS | {"vision_start_token_id": START, "vision_end_token_id": END}
GLM_MARKS = MARKS | {"image_start_token_id": START, "image_end_token_id": END}


@dataclass(frozen=True)
class Pixels:
    """What an image processor returns for the images of a prompt."""

    inputs: dict[str, torch.Tensor]
    rows: list[list[int]]
    """Of each image the lengths of its runs of tokens; another token stands between two runs."""
    grids: list[tuple[int, int]] | None = None
    """Tokens of each image in height and width, for models with positions in both."""


def _noise(draw: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=draw)


def _grid_sizes(draw: torch.Generator, images: int) -> list[tuple[int, int]]:
    """Return patches in height and width: an even number, and different from image to image."""
    sizes = [(2, 4), (4, 2), (4, 4), (2, 6), (4, 6)]
    order = torch.randperm(len(sizes), generator=draw).tolist()
    return [sizes[order[i % len(order)]] for i in range(images)]


def _grid_pixels(draw: torch.Generator, images: int) -> Pixels:
    sizes = _grid_sizes(draw, images)
    patches = sum(height * width for height, width in sizes)
    grids = [(height // 2, width // 2) for height, width in sizes]
    inputs = {
        "pixel_values": _noise(draw, patches, 3 * 2 * PATCH**2),
        "image_grid_thw": torch.tensor([(1, *size) for size in sizes]),
    }
    return Pixels(inputs, [[height * width] for height, width in grids], grids)


def _kimi_pixels(draw: torch.Generator, images: int) -> Pixels:
    made = _grid_pixels(draw, images)
    patches = len(made.inputs["pixel_values"])
    return Pixels(made.inputs | {"pixel_values": _noise(draw, patches, 3, PATCH, PATCH)}, made.rows)


def _square_pixels(tokens: int) -> Callable[[torch.Generator, int], Pixels]:
    """Return the pixels of families that have one size of images, with so many tokens each."""
    return lambda draw, images: Pixels({"pixel_values": _noise(draw, images, 3, SIDE, SIDE)}, [[tokens]] * images)


def _tiled_pixels(draw: torch.Generator, images: int) -> Pixels:
    tiles = [2 - i % 2 for i in range(images)]
    return Pixels({"pixel_values": _noise(draw, sum(tiles), 3, SIDE, SIDE)}, [[4 * each] for each in tiles])


def _patch_pixels(draw: torch.Generator, images: int) -> Pixels:
    """Return Gemma 4's: patches of each image, padded to the most."""
    sizes = _grid_sizes(draw, images)
    most = 24
    places = torch.full((images, most, 2), -1)
    for i, (height, width) in enumerate(sizes):
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        places[i, : height * width] = torch.stack([columns.flatten(), rows.flatten()], dim=1)
    inputs = {"pixel_values": torch.rand(images, most, 3 * PATCH**2, generator=draw), "image_position_ids": places}
    return Pixels(inputs, [[height * width // 4] for height, width in sizes])


def _sized_pixels(draw: torch.Generator, images: int) -> Pixels:
    """Return Pixtral's: images of their own sizes, padded to the largest; a token ends each row of an image."""
    sizes = [(height * PATCH, width * PATCH) for height, width in _grid_sizes(draw, images)]
    pixels = torch.zeros(images, 3, max(size[0] for size in sizes), max(size[1] for size in sizes))
    for i, (height, width) in enumerate(sizes):
        pixels[i, :, :height, :width] = _noise(draw, 3, height, width)
    merged = 2 * PATCH
    rows = [[width // merged] * (height // merged) for height, width in sizes]
    return Pixels({"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}, rows)


def _masked_pixels(draw: torch.Generator, images: int) -> Pixels:
    """Return Idefics3's: images of a prompt in one row, the right side of some of them masked."""
    mask = torch.ones(1, images, SIDE, SIDE, dtype=torch.int64)
    mask[0, ::2, :, SIDE - PATCH :] = 0
    pixels = _noise(draw, 1, images, 3, SIDE, SIDE) * mask[:, :, None]
    return Pixels({"pixel_values": pixels, "pixel_attention_mask": mask}, [[4]] * images)


def _tiled_at_once_pixels(draw: torch.Generator, images: int) -> Pixels:
    """Return LLaVA-OneVision's: the whole image and its tiles, 4 x 4 tokens each, a token at the end of each row."""
    if images > 1:  # several images have no tiles
        inputs = {
            "pixel_values": _noise(draw, images, 1, 3, SIDE, SIDE),
            "image_sizes": torch.tensor([(SIDE, SIDE)] * images),
            "batch_num_images": torch.tensor([images]),
        }
        return Pixels(inputs, [[4 * 4 + 1]] * images)
    inputs = {"pixel_values": _noise(draw, 1, 3, 3, SIDE, SIDE), "image_sizes": torch.tensor([(SIDE, 2 * SIDE)])}
    return Pixels(inputs | {"batch_num_images": torch.tensor([1])}, [[4 * 4 + 4 * (8 + 1)]])


def _padded_patch_pixels(draw: torch.Generator, images: int) -> Pixels:
    """Return LFM2-VL's: patches of each image, padded to the most."""
    sizes = _grid_sizes(draw, images)
    most = 24
    mask = torch.zeros(images, most, dtype=torch.int64)
    for i, (height, width) in enumerate(sizes):
        mask[i, : height * width] = 1
    inputs = {
        "pixel_values": _noise(draw, images, most, 3 * PATCH**2) * mask[:, :, None],
        "spatial_shapes": torch.tensor(sizes),
        "pixel_attention_mask": mask,
    }
    return Pixels(inputs, [[height * width // 4] for height, width in sizes])


@dataclass(frozen=True)
class VisionFamily:
    """A family: its tiny model, and how a prompt with images looks."""

    config: Callable[[], Any]
    """Makes the configuration of a tiny model."""
    pixels: Callable[[torch.Generator, int], Pixels]
    """(generator, number of images) -> what the image processor returns."""
    types: str | None = None
    """What its processor calls the [B, L] tensor that is 1 at tokens of images, where the model reads it."""
    packs: bool = True
    """Whether positions that restart separate the sequences of a row."""
    layouts: tuple[str, ...] = ("grouped", "grouped_masked", "packed", "padded")
    """Those that the start check accepts; auto selects the first."""

    def prompt(self, seed: int, images: int = 1) -> tuple[list[int], PromptImages]:
        """Return the tokens of a prompt, text before, between and after its images, and the images."""
        draw = torch.Generator().manual_seed(seed)
        made = self.pixels(draw, images)
        ids: list[int] = []
        for runs in made.rows:
            ids += [*text(draw, 2, 5), START]
            for run in runs:
                ids += [IMAGE] * run + [END]
        ids += text(draw, 2, 5)
        axes = None if made.grids is None else image_axes(ids, IMAGE, made.grids)
        tokens = tuple(sum(runs) for runs in made.rows)
        return ids, PromptImages(made.inputs, f"{seed}/{images}", IMAGE, axes, tokens=tokens)


def text(draw: torch.Generator, least: int, most: int) -> list[int]:
    """Return `least` to `most` random tokens of text."""
    length = int(torch.randint(least, most + 1, (), generator=draw))
    return torch.randint(TEXT_TOKENS.start, TEXT_TOKENS.stop, (length,), generator=draw).tolist()


def _qwen(name: str, **text_extra: Any) -> Callable[[], Any]:
    kind = getattr(transformers, f"{name}Config")
    towers: dict[str, dict[str, Any]] = {
        "Qwen2VL": {"embed_dim": 16, "hidden_size": 32},
        "Qwen2_5_VL": {"window_size": 16, "fullatt_block_indexes": [1]},
        "Qwen3VL": {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    }
    extra = towers.get(name) or towers["Qwen3VL"]
    tower = GRID_TOWER | extra
    if name == "Qwen2VL":
        del tower["out_hidden_size"], tower["intermediate_size"]
    if name.startswith("Qwen3_5"):
        del tower["deepstack_visual_indexes"]
    return lambda: kind(
        text_config=TEXT | {"rope_parameters": MROPE} | copy.deepcopy(text_extra),
        vision_config=copy.deepcopy(tower),
        **QWEN_MARKS,
    )


def _glm(name: str, **text_extra: Any) -> Callable[[], Any]:
    kind = getattr(transformers, f"{name}Config")
    parts = ("glm4v_text", "glm4v_vision") if name == "Glm46V" else (None, None)
    rope = MROPE | {"partial_rotary_factor": 0.5}
    text_part = TEXT | {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope} | text_extra
    tower = GRID_TOWER | {"image_size": SIDE}
    if parts[0]:
        text_part, tower = text_part | {"model_type": parts[0]}, tower | {"model_type": parts[1]}
    return lambda: kind(text_config=copy.deepcopy(text_part), vision_config=copy.deepcopy(tower), **GLM_MARKS)


def _gemma4(attention: str | None) -> Callable[[], Any]:
    return lambda: transformers.Gemma4Config(
        text_config=TEXT
        | {
            "head_dim": 8,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "use_bidirectional_attention": attention,
            "pad_token_id": 0,  # stands where images are in the embeddings of single layers
            **ALTERNATING,
        },
        vision_config=TOWER
        | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": PATCH, "pooling_kernel_size": 2,
           "position_embedding_size": 16},
        boi_token_id=START,
        eoi_token_id=END,
        audio_token_id=VOCAB + 1,
        **MARKS,
    )  # fmt: skip


def with_sound() -> Any:
    """Return the configuration of a tiny Gemma 4 that also has a tower of sound, as the published small ones do."""
    sound = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 2],
        "output_proj_dims": 8,
    }  # fmt: skip
    config = _gemma4(None)()
    config.audio_config = transformers.Gemma4AudioConfig(**sound)
    return config


def _idefics(name: str) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{name}Config")(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=TOWER | {"image_size": SIDE, "patch_size": PATCH},
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )


PADDED_ONLY = ("padded",)
"""Where a layer carries a state or tokens of an image attend to each other both ways."""

VISION_FAMILIES: dict[str, VisionFamily] = {
    "Qwen2-VL": VisionFamily(_qwen("Qwen2VL"), _grid_pixels, "mm_token_type_ids"),
    "Qwen2.5-VL": VisionFamily(_qwen("Qwen2_5_VL"), _grid_pixels, "mm_token_type_ids"),
    "Qwen3-VL": VisionFamily(_qwen("Qwen3VL", head_dim=8), _grid_pixels, "mm_token_type_ids"),
    "Qwen3-VL-MoE": VisionFamily(
        _qwen("Qwen3VLMoe", head_dim=8, num_experts=4, **EXPERTS), _grid_pixels, "mm_token_type_ids"
    ),
    "Qwen3.5": VisionFamily(_qwen("Qwen3_5", **HYBRID), _grid_pixels, "mm_token_type_ids", packs=False,
        layouts=PADDED_ONLY),
    "Qwen3.5-MoE": VisionFamily(
        _qwen("Qwen3_5Moe", **HYBRID, num_experts=4, shared_expert_intermediate_size=16, **EXPERTS),
        _grid_pixels,
        "mm_token_type_ids",
        packs=False,
        layouts=PADDED_ONLY,
    ),
    "GLM-4.1V": VisionFamily(_glm("Glm4v"), _grid_pixels, "mm_token_type_ids"),
    "GLM-4.6V": VisionFamily(_glm("Glm46V"), _grid_pixels, "mm_token_type_ids"),
    "GLM-4.5V-MoE": VisionFamily(_glm("Glm4vMoe", **ROUTED), _grid_pixels, "mm_token_type_ids"),
    "Gemma 3": VisionFamily(
        lambda: transformers.Gemma3Config(
            text_config=TEXT | {"head_dim": 8, "query_pre_attn_scalar": 8, **ALTERNATING},
            vision_config=SIGLIP,
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=START,
            eoi_token_index=END,
        ),
        _square_pixels(4),
        "token_type_ids",
        layouts=PADDED_ONLY,
    ),
    "Gemma 4": VisionFamily(
        _gemma4(None), _patch_pixels, "mm_token_type_ids", layouts=("grouped", "packed", "padded")
    ),
    "Gemma 4, images both ways": VisionFamily(
        _gemma4("vision"), _patch_pixels, "mm_token_type_ids", layouts=PADDED_ONLY
    ),
    "InternVL": VisionFamily(
        lambda: transformers.InternVLConfig(
            text_config=TEXT | {"model_type": "qwen2"},
            vision_config=TOWER | {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
            image_token_id=IMAGE,
            image_seq_length=4,
        ),
        _tiled_pixels,
    ),
    "Mistral 3": VisionFamily(
        lambda: transformers.Mistral3Config(
            text_config=TEXT | {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
            vision_config=TOWER | {"model_type": "pixtral", "image_size": 2 * SIDE, "patch_size": PATCH},
            image_token_index=IMAGE,
            spatial_merge_size=2,
        ),
        _sized_pixels,
    ),
    "SmolVLM": VisionFamily(_idefics("SmolVLM"), _masked_pixels),
    "Idefics3": VisionFamily(_idefics("Idefics3"), _masked_pixels),
    "LLaVA-OneVision": VisionFamily(
        lambda: transformers.LlavaOnevisionConfig(
            text_config=TEXT | {"model_type": "qwen2"},
            vision_config=SIGLIP,
            image_token_index=IMAGE,
            video_token_index=VIDEO,
            image_grid_pinpoints=[[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE]],
        ),
        _tiled_at_once_pixels,
    ),
    "LLaVA": VisionFamily(
        lambda: transformers.LlavaConfig(
            text_config=TEXT | {"model_type": "llama"},
            vision_config=TOWER | {"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH},
            image_token_index=IMAGE,
            image_seq_length=16,
        ),
        _square_pixels(16),
    ),
    "LLaVA, Pixtral": VisionFamily(
        lambda: transformers.LlavaConfig(
            text_config=TEXT | {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
            vision_config=TOWER | {"model_type": "pixtral", "image_size": 2 * SIDE, "patch_size": 2 * PATCH},
            image_token_index=IMAGE,
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        ),
        _sized_pixels,
    ),
    "Kimi K2.5": VisionFamily(
        lambda: transformers.Kimi_K25Config(
            text_config=TEXT | {"model_type": "deepseek_v3"} | LATENT,
            vision_config=TOWER | {"patch_size": PATCH, "pos_emb_height": 4, "pos_emb_width": 4},
            projection_hidden_size=16,
            **QWEN_MARKS,
        ),
        _kimi_pixels,
    ),
    "LFM2-VL": VisionFamily(
        lambda: transformers.Lfm2VlConfig(
            text_config=TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            vision_config=TOWER | {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": PATCH,
                                   "vision_use_head": False},
            image_token_id=IMAGE,
            projector_hidden_size=16,
            downsample_factor=2,
        ),
        _padded_patch_pixels,
        packs=False,
        layouts=PADDED_ONLY,
    ),
}  # fmt: skip
"""Families that train with images."""


def _llama4() -> Any:
    return transformers.Llama4Config(
        text_config=TEXT
        | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
           "attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"],
           "no_rope_layers": [1, 0]},
        vision_config=TOWER
        | {"intermediate_size": 64, "image_size": SIDE, "patch_size": PATCH, "vision_output_dim": 16,
           "projector_input_dim": 16, "projector_output_dim": 16},
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )  # fmt: skip


REFUSED_FAMILIES: dict[str, VisionFamily] = {
    "Llama 4": VisionFamily(_llama4, _square_pixels(4)),
    "PaliGemma": VisionFamily(
        lambda: transformers.PaliGemmaConfig(
            text_config=TEXT | {"model_type": "gemma", "head_dim": 8},
            vision_config=SIGLIP | {"projection_dim": 32},
            projection_dim=32,
            hidden_size=32,
            vocab_size=VOCAB,
            image_token_index=IMAGE,
        ),
        _square_pixels(16),
        "token_type_ids",
    ),
}
"""Families that are refused (`hwgrpo.models.vision.unsupported_reason`)."""


@cache
def model_of(name: str) -> Any:
    """Return the tiny random model of a family in fp32, in eval mode. Do not change it: it is everyone's."""
    family = VISION_FAMILIES.get(name) or REFUSED_FAMILIES[name]
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(family.config(), dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(8)
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide that they are left out
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw) * 0.2
            parameter.copy_(parameter + noise if parameter.ndim == 1 else noise)
            if key.endswith("dt_bias"):  # else a recurrent state is forgotten after one token
                parameter.sub_(3)
    return model


def frozen(name: str) -> Any:
    """Return a copy of a family's model without gradients."""
    return copy.deepcopy(model_of(name)).requires_grad_(False)


def exact_copy(model: Any) -> Any:
    """Return a copy in fp64, with loops over experts, which can compute in it.

    Norms and rotations of many families still compute in fp32.
    """
    exact = copy.deepcopy(model).double().eval()
    for config in (exact.config, exact.config.get_text_config()):
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
    return exact


def reference_logits(
    model: Any, family: VisionFamily, ids: Sequence[int], response: Sequence[int], images: PromptImages | None
) -> torch.Tensor:
    """Return logits [P + R, V] of one sequence by the model's own forward, as its processor's output has them.

    Args:
        model: the model; its dtype is that of the computation.
        family: the model's.
        ids: of the prompt's P tokens.
        response: R tokens.
        images: of the prompt; None: text alone.
    """
    row = torch.tensor([[*ids, *response]])
    options: dict[str, Any] = {}
    if images is not None:
        options = {
            name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in images.inputs.items()
        }
    if family.types is not None:
        options[family.types] = (row == IMAGE).long()
    if hasattr(getattr(model, "model", None), "rope_deltas"):
        model.model.rope_deltas = None  # of an earlier call
    return model(input_ids=row, use_cache=False, **options).logits[0]


def reference_logprobs(
    model: Any, family: VisionFamily, ids: Sequence[int], response: Sequence[int], images: PromptImages | None
) -> torch.Tensor:
    """Return the log-prob [R] of each token of a response (arguments as those of `reference_logits`)."""
    logits = reference_logits(model, family, ids, response, images)[len(ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


@dataclass(frozen=True)
class Row:
    """A sequence: the tokens of a prompt, its images and a response."""

    ids: list[int]
    images: PromptImages | None
    response: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.ids + self.response

    @property
    def positions(self) -> torch.Tensor:
        """[4, P + R]: of the text, then in time, height and width."""
        axes = text_axes(len(self.ids)) if self.images is None or self.images.axes is None else self.images.axes
        response = text_axes(len(self.response)) + int(axes.max()) + 1
        return torch.cat([torch.arange(len(self.tokens))[None], torch.cat([axes, response]).T])


def left_padded(rows: Sequence[Row], axes: bool) -> dict[str, torch.Tensor]:
    """Return tokens, mask and positions of rows [B, L] ([4, B, L] with axes) that end in the same column."""
    longest = max(len(row.tokens) for row in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.int64)
    positions = torch.zeros(4, len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        start = longest - len(row.tokens)
        ids[i, start:], mask[i, start:], positions[:, i, start:] = torch.tensor(row.tokens), 1, row.positions
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions if axes else positions[0]}


def encoded_logits(model: Any, encoder: ImageEncoder, rows: Sequence[Row]) -> list[torch.Tensor]:
    """Return logits [P + R, V] of each row, by one forward of the backbone with images encoded once."""
    options = left_padded(rows, encoder.uses_axes)
    images = [row.images for row in rows if row.images is not None]
    options |= encoder.inputs(options["input_ids"], images)
    hidden = backbone(model)(**options, use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden)
    return [each[-len(row.tokens) :] for each, row in zip(logits, rows, strict=True)]
