"""A small vision-language model of Qwen2-VL's architecture, warm-started on a task about pictures."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AddedToken, PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hwgrpo.data.agent_tasks import ASSISTANT, ROLES
from hwgrpo.data.image_prompts import expand_marks
from hwgrpo.data.picture_tasks import MARK, Demonstration, PictureTask
from hwgrpo.models.tiny import (
    EOS,
    INITIALIZER_RANGE,
    PAD,
    POSITIONS,
    character_tokenizer,
    observed_tokens,
    one_thread,
    warm_start,
)

BEGIN, IMAGE, END_OF_IMAGE, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}" + BEGIN + IMAGE + END_OF_IMAGE + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PATCH, MERGE = 4, 2
LEAST_PIXELS, MOST_PIXELS = 16 * 16, 64 * 64


def make(
    *, task: PictureTask, seed: int, hidden: int, layers: int, steps: int, batch: int, lr: float, head: int = 16
) -> tuple[Qwen2VLForConditionalGeneration, PreTrainedTokenizerFast, Any]:
    """Build and warm-start a model, as `tiny.make` does for text; it returns its image processor, too."""
    tokenizer, marks = with_image_tokens(character_tokenizer(task.alphabet), task.tokens)
    processor = image_processor(MOST_PIXELS)
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2VLForConditionalGeneration(_config(tokenizer, marks, hidden, layers, head)).float()
        assert model.generation_config is not None
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        if steps:
            examples, seen = task.examples(steps * batch, seed), {}
            parts = (examples[start : start + batch] for start in range(0, len(examples), batch))
            warm_start(model, (_tensors(model.config, tokenizer, processor, part, seen) for part in parts), steps, lr)
            model.model.rope_deltas = None  # of its own forwards
    return model.eval(), tokenizer, processor


def with_image_tokens(
    tokenizer: PreTrainedTokenizerFast, further: Sequence[str] = ()
) -> tuple[PreTrainedTokenizerFast, dict[str, int]]:
    """Return a tokenizer with a chat template that shows images, and the ids of its tokens of images.

    Args:
        tokenizer: is extended.
        further: tokens to add after those of roles.
    """
    marks: list[str | AddedToken] = [AddedToken(text, special=True) for text in (BEGIN, END_OF_IMAGE, IMAGE, VIDEO)]
    tokenizer.add_tokens(marks, special_tokens=True)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (*ROLES, *further)])
    tokenizer.chat_template = CHAT_TEMPLATE
    ids = tokenizer.get_vocab()
    return tokenizer, {
        "image_token_id": ids[IMAGE],
        "video_token_id": ids[VIDEO],
        "vision_start_token_id": ids[BEGIN],
        "vision_end_token_id": ids[END_OF_IMAGE],
    }


def image_processor(most_pixels: int) -> Qwen2VLImageProcessorPil:
    """Return the image processor of models with patches of 4 pixels, for images of at most so many."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, min_pixels=LEAST_PIXELS, max_pixels=most_pixels
    )


def _config(
    tokenizer: PreTrainedTokenizerFast, marks: Mapping[str, Any], hidden: int, layers: int, head: int
) -> Qwen2VLConfig:
    ids = tokenizer.get_vocab()
    half = head // 2
    text = {
        "vocab_size": len(ids),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // head,
        "num_key_value_heads": hidden // (2 * head),
        "max_position_embeddings": POSITIONS,
        "initializer_range": INITIALIZER_RANGE,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        },
        "bos_token_id": None,
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD],
    }
    vision = {
        "depth": layers,
        "embed_dim": hidden,
        "num_heads": hidden // head,
        "hidden_size": hidden,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "initializer_range": INITIALIZER_RANGE,
    }
    return Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        **marks,
    )


def _tensors(
    config: Any,
    tokenizer: PreTrainedTokenizerFast,
    processor: Any,
    examples: Sequence[Demonstration],
    seen: dict[bytes, Mapping[str, torch.Tensor]],
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a forward's inputs and next-token targets [B, L] int64, -100 where there is no loss.

    Args:
        config: the model's.
        tokenizer: its tokenizer.
        processor: its image processor.
        examples: demonstrations.
        seen: image -> what the processor makes of it; a row is drawn many times.
    """
    vocabulary = tokenizer.get_vocab()
    encoded: list[tuple[list[int], int]] = []
    pixels: list[Mapping[str, torch.Tensor]] = []
    for prompt, response, images in examples:
        for png in images:
            if png not in seen:
                seen[png] = dict(processor(images=[Image.open(io.BytesIO(png))], return_tensors="pt"))
        counts = [int(seen[png]["image_grid_thw"].prod()) // MERGE**2 for png in images]
        shown = (prompt + response + EOS).replace(MARK, BEGIN + IMAGE + END_OF_IMAGE)
        tokens = expand_marks(tokenizer.encode(shown, add_special_tokens=False), config.image_token_id, counts)
        encoded.append((tokens, tokens.index(vocabulary[ASSISTANT]) + 1))
        pixels += [seen[png] for png in images]
    longest = max(len(tokens) for tokens, _ in encoded)
    ids = np.full((len(examples), longest), vocabulary[PAD])
    targets = np.full((len(examples), longest), -100)
    for row, (tokens, start) in enumerate(encoded):
        ids[row, : len(tokens)] = tokens
        targets[row, start : len(tokens)] = tokens[start:]
    targets[observed_tokens(ids, vocabulary[EOS], vocabulary[ASSISTANT])] = -100
    rows = torch.from_numpy(ids[:, :-1])
    return {
        "input_ids": rows,
        "mm_token_type_ids": (rows == config.image_token_id).long(),
        **{name: torch.cat([each[name] for each in pixels]) for name in (pixels[0] if pixels else ())},
    }, torch.from_numpy(targets[:, 1:])
