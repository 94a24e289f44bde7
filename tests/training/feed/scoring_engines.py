"""Engines with a model that scores, and is sent weights as vLLM is; faults keep weights from being applied."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file

from hwgrpo.models.lm_head import causal_lm
from hwgrpo.models.lora import TRAINED_ADAPTER
from hwgrpo.rollout.local.engine import score
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import ADAPTER
from tests.support.servers.fake_server import FakeServer, good, scored

ONE = "model.layers.1.mlp.up_proj.weight"


class EngineModel:
    """The weights of a rollout engine.

    Attributes:
        faults: names of the faults that happen from now on.
    """

    def __init__(self, policy: Any, dtype: torch.dtype) -> None:
        self.policy = copy.deepcopy(policy).to(dtype).eval()
        self.faults: set[str] = set()
        self.begun = copy.deepcopy(self.policy.state_dict())

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights of the base model."""
        state = {name: tensor.clone() for name, tensor in weights}
        if "weights not applied" in self.faults:
            return
        if "one tensor stale" in self.faults:
            del state[ONE]
        missing = self.policy.load_state_dict(state, strict=False)
        assert not missing.unexpected_keys
        if "one flipped bit" in self.faults:
            dict(self.policy.named_parameters())["model.norm.weight"].view(torch.int32)[3] ^= 1 << 24  # the exponent's

    def load_adapter(self, tensors: dict[str, torch.Tensor]) -> None:
        if "adapter not applied" in self.faults:
            return
        if "adapter applied twice" in self.faults:
            tensors = {name: 2 * tensor if "lora_B" in name else tensor for name, tensor in tensors.items()}
        if "another adapter" in self.faults:
            tensors = {name: tensor.flip(0) for name, tensor in tensors.items()}
        set_peft_model_state_dict(self.policy, tensors, adapter_name=TRAINED_ADAPTER)

    @torch.no_grad()
    def restart(self) -> None:
        """Go back to the weights of the model's folder."""
        self.policy.load_state_dict(self.begun)

    @torch.no_grad()
    def damage_base(self) -> None:
        dict(causal_lm(self.policy).named_parameters())["model.norm.weight"].mul_(1.5)

    def score(self, sequences: list[list[int]], *, adapter: bool) -> list[list[float]]:
        return score(self.policy, sequences, adapter=adapter)


class LoraRequest(NamedTuple):
    """vLLM's request for an adapter."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class ScoringLlm:
    """vLLM's LLM as far as the engine uses it for weights and scores; it reads an adapter when it is first used."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.active = 0
        self.llm_engine = SimpleNamespace(
            set_weight_version=lambda version: None,
            remove_lora=lambda number: None,
            engine_core=SimpleNamespace(shutdown=lambda: None),
        )

    def collective_rpc(self, method: Any, args: tuple) -> None:
        self.model.load(*args)

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts: list[dict], settings: list[Any], *, use_tqdm: bool, lora_request: Any) -> list[Any]:
        assert [(asked.prompt_logprobs, asked.max_tokens) for asked in settings] == [(0, 1)]
        if lora_request is not None and lora_request.lora_int_id != self.active:
            self.active = lora_request.lora_int_id
            self.model.load_adapter(load_file(Path(lora_request.lora_path) / "adapter_model.safetensors"))
        (tokens,) = [prompt["prompt_token_ids"] for prompt in prompts]
        (logprobs,) = self.model.score([tokens], adapter=lora_request is not None)
        entries = [{t: SimpleNamespace(logprob=value)} for t, value in zip(tokens[1:], logprobs, strict=True)]
        return [SimpleNamespace(prompt_logprobs=[None, *entries])]


class ScoringServer(FakeServer):
    """A server with the plugin and a model, which has the version that it was told, whatever the faults."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        super().__init__()

    def take(self, order: dict[str, Any]) -> None:
        super().take(order)
        if order["adapter"]:
            self.model.load_adapter(self.weights)
        else:
            self.model.load(self.weights.items())

    def answer(self, asked: dict[str, Any]) -> Any:
        if "prompt_logprobs" not in asked:
            return good(asked)
        assert asked["model"] in ("fake", ADAPTER)
        (logprobs,) = self.model.score([asked["prompt"]], adapter=asked["model"] == ADAPTER)
        return scored(asked["prompt"], logprobs)
