"""What an engine on vLLM does with images, beside the local engine; run where vLLM is, by vllm_environment.py.

python vision_worker.py ENGINE RESULT.json CASE ...
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from hwgrpo.catalog import ENGINES
from hwgrpo.data.image_prompts import ImagePrompts, load_image_prompts
from hwgrpo.models.loading import resolve_model_path
from hwgrpo.models.placeholders import placeholder_ids
from hwgrpo.models.vision import image_encoder, own_logits
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.local.engine import local_engine
from hwgrpo.values import Prompt, PromptBatch, PromptImages, Sampling
from tests.vllm.vision_folder import BUILT_IN, make_folder
from tests.vllm.vllm_worker import GREEDY, apart, change, parts_of, probed

UPDATES = 2
DRAWS, TEMPERATURE = 4000, 2.0
SIZES = ((32, 32), (24, 56), (64, 40))


def shown(made: ImagePrompts, *images: Any) -> Prompt:
    """Return a prompt that shows images before a question."""
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    ids, of_prompt = made.encode(made.render().replace(mark, mark * len(images)), images, "test")
    return prompt_of(of_prompt.digest, ids, of_prompt)


def prompt_of(uid: str, ids: Sequence[int], images: PromptImages | None) -> Prompt:
    """Return a prompt of tokens and images."""
    return Prompt(uid=uid, text="", token_ids=tuple(ids), ground_truth=None, columns={}, images=images)


def noise(seed: int) -> Image.Image:
    """Return an image of noise."""
    width, height = SIZES[seed % len(SIZES)]
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def vision_parts(kind: str, output: str, model: str, *overrides: str) -> tuple[EngineParts, ImagePrompts]:
    """Return what an engine is made from, and what makes prompts."""
    parts = parts_of(kind, output, f"model.path={model}", "data.train=task://squares", *overrides)
    made = load_image_prompts(resolve_model_path(model), None, parts.model.config, parts.tokenizer)
    assert made is not None
    sample = prompt_of("sample", *made.sample())
    encoder = image_encoder(parts.model)
    assert encoder is not None
    encoder.sample = sample
    return replace(parts, image_sample=sample), made


def prompts(made: ImagePrompts) -> PromptBatch:
    """Return prompts of text, of one image, of two in both orders, and of four."""
    images = [noise(seed) for seed in range(4)]
    rows = (images[:1], images[1:2], images[:2], images[1::-1], images)
    text = [token for token in shown(made, images[0]).token_ids if token != made.token_id]
    return PromptBatch((prompt_of("text", text, None), *(shown(made, *row) for row in rows)))


def compared(parts: EngineParts, engine: Any, batch: PromptBatch) -> dict[str, Any]:
    """Compare greedy responses with the local engine's; "sums" of the log-probs tell its prompts apart."""
    theirs, ours = engine.generate(batch, GREEDY), local_engine(parts).generate(batch, GREEDY)
    bounds = ours.offsets.tolist()
    sums = [round(float(ours.logprobs[first:last].sum()), 5) for first, last in itertools.pairwise(bounds)]
    return apart(theirs, ours) | {"version": theirs.weight_version, "sums": sums[:: GREEDY.n]}


def updates(parts: EngineParts, engine: Any, batch: PromptBatch) -> list[dict[str, Any]]:
    """Change the policy again and again; compare with the local engine at the start and after every update."""
    found = [compared(parts, engine, batch)]
    for version in range(1, UPDATES + 1):
        change(parts.model, version)
        engine.update_weights(version)
        found.append(compared(parts, engine, batch))
    return found


@torch.no_grad()
def first_tokens(parts: EngineParts, engine: Any, made: ImagePrompts) -> dict[str, Any]:
    """Draw many first tokens; "expected" is how often the model alone would draw the token of images."""
    prompt = shown(made, noise(1))
    assert prompt.images is not None
    drawn = engine.generate(
        PromptBatch((prompt,)), Sampling(n=DRAWS, max_response_tokens=1, seed=5, temperature=TEMPERATURE)
    )
    logits = own_logits(parts.model, prompt.token_ids, prompt.images)[-1].float() / TEMPERATURE
    expected = DRAWS * float(logits.softmax(-1)[made.token_id])
    logits[placeholder_ids(parts.model.config)] = -torch.inf
    logprobs = logits.log_softmax(-1)
    return {
        "expected": expected,
        "images": int((drawn.tokens == made.token_id).sum()),
        "distinct": len(drawn.tokens.unique()),
        "logprobs": float((drawn.logprobs - logprobs[drawn.tokens]).abs().max()),
    }


CASES: dict[str, tuple[str, str]] = {
    "frozen": ("Qwen2.5-VL", "model.train_vision=none"),
    "trained": ("Qwen2-VL", "model.train_vision=all"),
    "adapter": ("Qwen3-VL", "model.lora.rank=4"),
}


def collected(kind: str, output: str, case: str) -> dict[str, Any]:
    """Return what an engine does in a case."""
    family, trained = CASES[case]
    model = BUILT_IN if family == "Qwen2-VL" else make_folder(family, Path(output) / family)
    parts, made = vision_parts(kind, output, model, trained)
    engine = ENGINES.load(kind).make(parts)
    try:
        batch = prompts(made)
        found: dict[str, Any] = {"rows": updates(parts, engine, batch)}
        engine.update_weights(UPDATES)  # as another run on the same server, whose versions are the same
        found["again"] = compared(parts, engine, batch)
        found["drawn"] = first_tokens(parts, engine, made)
        if case == "trained":
            forget = lambda forgets: setattr(parts.weights, "forgets", forgets)  # noqa: E731
            found["probes"] = probed(parts, engine, UPDATES + 1, forget)
        return found
    finally:
        engine.close()


def main(kind: str, result: str, *cases: str) -> None:
    """Collect everything and write it down."""
    with tempfile.TemporaryDirectory() as output:
        found = {case: collected(kind, output, case) for case in cases}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
