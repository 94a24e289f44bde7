"""A character tokenizer that marks images as Qwen2-VL's, and its image processor with patches of 4 pixels."""

import io
from types import SimpleNamespace

from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from hwgrpo.data.image_prompts import ONE_IMAGE, by_marks

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
SHOWN = "".join(MARKS)
"""What the template writes for an image."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% if not loop.last or m.role != 'assistant' %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIDE = 8
"""Pixels of a side that become one token: patches of 4, of which 2 x 2 are merged."""


def image_tokenizer(tokenizer, template=TEMPLATE):
    """Add the marks and the template to a tokenizer."""
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = template
    return tokenizer


def image_config(tokenizer):
    """Return the fields of a Qwen2-VL configuration that prompts need."""
    start, pad, end = tokenizer.convert_tokens_to_ids(list(MARKS))
    return SimpleNamespace(
        model_type="qwen2_vl",
        vision_config=SimpleNamespace(spatial_merge_size=2),
        image_token_id=pad,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )


def image_processor():
    return Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=SIDE * SIDE, max_pixels=64 * SIDE * SIDE
    )


def image_prompts(tokenizer):
    """Return the `ImagePrompts` of a model with this tokenizer."""

    def render():
        return tokenizer.apply_chat_template(list(ONE_IMAGE), tokenize=False, add_generation_prompt=True)

    config = image_config(tokenizer)
    return by_marks(image_processor(), render, config.image_token_id, config, tokenizer)


def picture(width=16, height=16, color="red", form="png", **options):
    """Return the bytes of an image file of one color."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, form, **options)
    return file.getvalue()
