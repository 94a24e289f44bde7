"""Prompts with images for vLLM's engine: pixels and tokens as the trainer has them, so that both compute the same.

vLLM's own processing is left out: it would expand the tokens of an image once more, and may scale pixels differently.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from .http_protocol import ADAPTER

GRIDS = "image_grid_thw"
PIXELS = "pixel_values"


class Images(NamedTuple):
    """Images of a prompt, as an image processor returns them; several of these may follow each other in one prompt."""

    digest: str
    """The same for the same images."""
    token_id: int
    """Stands for a part of an image."""
    inputs: Mapping[str, torch.Tensor]
    """pixel_values [patches, C], image_grid_thw [images, 3] int64."""

    def to_json(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the images for a request; pixels in the dtype of the server's tower, which converts them to it."""
        tensors = {
            name: (each.to(dtype) if name == PIXELS else each).contiguous() for name, each in self.inputs.items()
        }
        return {"digest": self.digest, "token_id": self.token_id, "tensors": base64.b64encode(save(tensors)).decode()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Images:
        """Return what `to_json` was called on.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        try:
            tensors = load(base64.b64decode(str(value["tensors"]), validate=True))
        except SafetensorError as error:
            raise ValueError(f"its tensors are damaged: {error}") from error
        return cls(str(value["digest"]), int(value["token_id"]), tensors)


def places(tokens: Sequence[int], parts: Sequence[Images]) -> list[tuple[int, int]]:
    """Return where each image of a prompt stands: the place of its first token, and how many it has.

    Args:
        tokens: of the prompt, with one for each of the tower's features.
        parts: its images.

    Raises:
        ValueError: tokens and images do not match.
    """
    patches = [int(grid.prod()) for part in parts for grid in part.inputs[GRIDS]]
    token_id = parts[0].token_id
    count = list(tokens).count(token_id)
    if not count or sum(patches) % count:
        raise ValueError(f"a prompt has {count} tokens of images, and its images have {sum(patches)} patches")
    merged, found, start = sum(patches) // count, [], 0
    for number in patches:
        length = number // merged
        start = tokens.index(token_id, start)
        if any(token != token_id for token in tokens[start : start + length]):
            raise ValueError(f"an image of {length} tokens has fewer of them in the prompt")
        found.append((start, length))
        start += length
    return found


def engine_prompt(tokens: Sequence[int], parts: Sequence[Images], salt: str) -> Any:
    """Return a prompt with images as vLLM's engine takes it, past its own processing (vLLM 0.32).

    Args:
        tokens: of the prompt, with one for each of the tower's features.
        parts: its images.
        salt: names the weights: keys, values and features of others are not used.

    Raises:
        ValueError: tokens and images do not match.
    """
    if not parts:
        raise ValueError("the prompt has no images")
    inputs = importlib.import_module("vllm.multimodal.inputs")
    names = parts[0].inputs
    joined = {name: torch.cat([part.inputs[name] for part in parts]) for name in names}
    fields = {
        PIXELS: inputs.MultiModalFieldConfig.flat_from_sizes("image", joined[GRIDS].prod(-1)),
        GRIDS: inputs.MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    if set(fields) != set(names):
        raise ValueError(f"images have {sorted(names)}, not {sorted(fields)}")
    ranges = [inputs.PlaceholderRange(offset=start, length=length) for start, length in places(tokens, parts)]
    hashes = [f"{salt} {part.digest} {number}" for part in parts for number in range(len(part.inputs[GRIDS]))]
    return importlib.import_module("vllm.inputs").mm_input(
        prompt_token_ids=list(tokens),
        mm_kwargs=inputs.MultiModalKwargsItems.from_hf_inputs(joined, fields),
        mm_hashes={"image": hashes},
        mm_placeholders={"image": ranges},
        cache_salt=salt,
    )


def why_without_images(model_config: Any) -> str:
    """Return why this vLLM cannot be given prompts with images; "" where it can.

    Args:
        model_config: vLLM's.
    """
    try:
        known = hasattr(importlib.import_module("vllm.inputs"), "mm_input")
    except ImportError:
        known = False
    if not known:
        return "its vLLM is older than 0.32"
    multimodal = getattr(model_config, "multimodal_config", None)
    if multimodal is None:
        return "it serves a model of text"
    if multimodal.mm_device_do_normalize:
        return "it normalizes pixels itself; start it with --no-mm-device-do-normalize"
    return ""


async def generate(state: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Sample a prompt with images by the server's engine.

    Args:
        state: of vLLM's application.
        request: "model", "tokens", "images" (`Images.to_json` of each), "salt", and "sampling" (vLLM's SamplingParams).

    Returns:
        "prompt": number of its tokens, "scores": log-probs of those after the first, where they were asked for, and
        "samples" with "index", "tokens", "logprobs" and "finish_reason".

    Raises:
        KeyError, TypeError, ValueError: the request lacks a field, a field has another type, or tokens and images do
            not match.
    """
    tokens, salt, model = [int(token) for token in request["tokens"]], str(request["salt"]), str(request["model"])
    sampling = dict(request["sampling"])
    # in a thread: megabytes are decoded, and the server answers others meanwhile
    prompt = await asyncio.to_thread(_decoded_prompt, tokens, request["images"], salt)
    vllm = importlib.import_module("vllm")
    kind = importlib.import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
    if "logit_bias" in sampling:  # names in JSON are text
        sampling["logit_bias"] = {int(token): float(bias) for token, bias in sampling["logit_bias"].items()}
    settings = vllm.SamplingParams(**sampling, output_kind=kind)
    adapter = state.openai_serving_models.lora_requests.get(model)
    if adapter is None and model == ADAPTER:
        raise ValueError("no adapter is loaded")
    outputs = state.engine_client.generate(prompt, settings, uuid.uuid4().hex, lora_request=adapter)
    (output,) = [each async for each in outputs]
    samples = [
        {
            "index": sample.index,
            "tokens": list(sample.token_ids),
            "logprobs": logprobs_of(sample.token_ids, sample.logprobs),
            "finish_reason": sample.finish_reason,
        }
        for sample in output.outputs
    ]
    scores = logprobs_of(tokens[1:], output.prompt_logprobs[1:]) if output.prompt_logprobs else []
    return {"prompt": len(output.prompt_token_ids), "scores": scores, "samples": samples}


def _decoded_prompt(tokens: Sequence[int], images: Sequence[Mapping[str, Any]], salt: str) -> Any:
    return engine_prompt(tokens, [Images.from_json(each) for each in images], salt)


def logprobs_of(tokens: Sequence[int], candidates: Sequence[Mapping[int, Any]] | None) -> list[float]:
    """Return the log-prob of each token, of the candidates that vLLM has for its place; none where it has none."""
    if candidates is None:
        return []
    return [float(each[token].logprob) for token, each in zip(tokens, candidates, strict=True)]


async def until_disconnect(receive: Any, work: Any) -> dict[str, Any] | None:
    """Return what `work` returns; None where the client disconnects first, which ends it."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
