"""A request of the run -> vLLM's prompt and sampling parameters, for an engine in this process and for a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hwgrpo.rollout.requests import Request
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import Images
from hwgrpo.values import PromptImages

LOWEST_BIAS = -100.0
"""Least bias of a logit that vLLM takes: such a token has less than e^-70 of the probability."""


def sampling_parameters(request: Request, end_ids: Sequence[int], banned: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams`, but for `output_kind`.

    Args:
        request: the prompt and its settings.
        end_ids: tokens that end a response.
        banned: tokens that no response has.
    """
    sampling = request.sampling
    filters = {"temperature": 0.0}
    if not sampling.greedy:
        filters = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        }
    return {
        "n": request.n,
        "seed": request.seed,
        "max_tokens": sampling.max_response_tokens,
        "stop": [*sampling.stop],
        "stop_token_ids": [*end_ids],
        "ignore_eos": True,  # EOS is among the stop tokens
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": sampling.skip_special_tokens,
        "logprobs": 0,
        **({"logit_bias": biases(banned)} if banned else {}),
        **filters,
    }


SCORING = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
"""Arguments of `SamplingParams` for the log-probs of a prompt."""


def biases(banned: Sequence[int]) -> dict[int, float]:
    """Return the biases of logits with which tokens are not drawn."""
    return dict.fromkeys(banned, LOWEST_BIAS)


def parts_of(images: PromptImages) -> list[Images]:
    """Return a prompt's images as the plugin takes them."""
    return [Images(part.digest, part.token_id, part.inputs) for part in images.parts]
