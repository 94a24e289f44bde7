"""One training step of a recipe on a ledger: the project's own engine, passes and optimizer, on tensors without memory.

Prompts and responses have the longest lengths that the recipe allows, and every advantage is 1 or -1. Values that the
host would read from the device are 0: no response ends early. Startup checks, which compare values, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from hwgrpo_backends import Backend
from transformers import AutoModelForCausalLM

from hwgrpo.bench.ledger.kernel_ledger import KernelLedger, Stage
from hwgrpo.config import Config
from hwgrpo.config.derived import sampling_of
from hwgrpo.models import shared_prefix_masks
from hwgrpo.models.loading import turn_dropout_off
from hwgrpo.models.meta_device import META
from hwgrpo.planning.model_shape import planned_settings
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.local import decoding, engine
from hwgrpo.rollout.local.architectures import unsupported_reason
from hwgrpo.rollout.local.decode_rows import CHECK_LENGTH
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.rollout.local.graph_fallback import DecodeGraphs
from hwgrpo.rollout.local.kernel_fallback import DecodeKernels
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.rollout.policy_weights import ModuleWeights
from hwgrpo.training.module_fusion import fuse
from hwgrpo.training.policy.auto_settings import choose_attention, choose_dtype, choose_layout, may_use_lengths
from hwgrpo.training.policy.layouts import PACKED_BY_LENGTHS
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.reference_model import Reference, build_reference
from hwgrpo.training.shared_setup import make_trainable, policy_of
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import Prompt, PromptBatch, TrainBatch

PREFILL, EAGER, RECORDING, GRAPH = "prefill", "decode step, eager", "decode step, recorded", "decode step, replayed"
SAMPLER, GENERATION_REST = "sampler", "generation, rest"
REFERENCE, REFERENCE_HEAD, REFERENCE_REST = "reference", "reference LM head", "reference, rest"
FORWARD, HEAD, BACKWARD, UPDATE_REST = "update forward", "LM head and loss", "update backward", "update, rest"
CLIP, OPTIMIZER, SYNC = "gradient clipping", "optimizer", "weights to rollout"
STAGES = (
    *(PREFILL, EAGER, RECORDING, GRAPH, SAMPLER, GENERATION_REST, REFERENCE, REFERENCE_HEAD, REFERENCE_REST),
    *(FORWARD, HEAD, BACKWARD, UPDATE_REST, CLIP, OPTIMIZER, SYNC),
)
"""In the order of a step. A "rest" is what its neighbours leave: copies to the device, and waits for it."""


@dataclass(frozen=True)
class LedgerDevice:
    """The device of a ledger, with what code asks of a `Device`."""

    backend: Backend
    torch_device: torch.device
    recorder: Callable[[Callable[[], Any]], Any]
    name: str
    arch: str
    compute_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)


class Replayed:
    """Recording of work on a ledger; see `hwgrpo_backends.graphs.Recording`. Recording it runs the work once."""

    def __init__(self, ledger: KernelLedger, work: Callable[[], Any]) -> None:
        self._ledger = ledger
        with ledger.stage(RECORDING, sealed=True):
            work()
        with ledger.apart() as self._stage:
            self.output = work()

    def replay(self) -> None:
        with self._ledger.stage(GRAPH) as stage:
            stage.add(self._stage)

    def release(self) -> None: ...


class NoTokenizer:
    """Tokenizer without an end token, so that no response ends early."""

    eos_token_id = None

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""


class LedgerStep:
    """The parts of a run whose kernels a ledger counts. Made within `ledger.counting`.

    Args:
        config: the settings; one process, and the local engine whatever `rollout.engine` is.
        ledger: where the kernels are counted.
        device: that `ledger.counting` yields.
        backend: the device's family.

    Raises:
        ConfigError: the settings do not suit the model or the device.
    """

    def __init__(self, config: Config, ledger: KernelLedger, device: torch.device, backend: Backend) -> None:
        self.config, self.ledger = config, ledger
        rates = ledger.rates
        self._device: Any = LedgerDevice(backend, device, lambda work: Replayed(ledger, work), rates.chip, rates.arch)
        self._policy, self._layout = self._make_policy()
        self._reference = build_reference(self._policy, config.algorithm.kl, config.model.lora)
        self.engine = self._make_engine()

    def _make_policy(self) -> tuple[PolicyModel, Any]:
        config, backend = self.config, self._device.backend
        settings = planned_settings(config.model)[0]
        turn_dropout_off(settings)
        dtype = choose_dtype(config.model.dtype, self._device)
        attention = choose_attention(config, backend, dtype, settings, self._device.arch)
        with META:
            model = AutoModelForCausalLM.from_config(
                settings, dtype=torch.float32, attn_implementation=attention.loaded_as
            )
        model = make_trainable(config, model, compute_dtype=dtype, on_meta_device=True)
        policy = policy_of(config, self._device, model, None)
        fuse(config, backend, policy, attention)
        by_lengths = may_use_lengths(config, settings, dtype, self._device.torch_device.type)
        layout = choose_layout(config, policy.base.config, attention.loaded_as, by_lengths=by_lengths)
        if by_lengths and layout.name in ("grouped", "packed") and attention.loaded_as == "sdpa":
            shared_prefix_masks.use_lengths(policy.base)  # as the start does after its test
            layout = layout if layout.shares_prompt else PACKED_BY_LENGTHS
        return policy, layout

    def _make_engine(self) -> LocalEngine:
        parts = EngineParts(
            config=self.config,
            model=self._policy.model,
            weights=ModuleWeights(self._policy.model),
            tokenizer=NoTokenizer(),  # pyright: ignore[reportArgumentType]
            device=self._device,
            compute_dtype=self._policy.compute_dtype,
        )
        with (
            patch.object(engine, "check_cache", lambda *_: True),
            patch.object(engine, "check_lean_step", lambda model, *_, **__: unsupported_reason(model, CHECK_LENGTH)),
            patch.object(engine, "describe_drift", lambda *_: None),
            patch.object(DecodeKernels, "check", lambda *_: None),
            patch.object(DecodeGraphs, "check", lambda *_: None),
        ):
            return engine.local_engine(parts)

    def run(self) -> None:
        """Count a step: generation, reference log-probs, one update, and the weights' way back to the engine."""
        self.generate()
        batch = self.batch()
        update = self.update()
        if self._reference is not None:
            batch = self._score(update, self._reference, batch)
        self.count_update(update, batch)
        with self.ledger.stage(SYNC):
            self.engine.update_weights(1)

    def count_update(self, update: PolicyUpdate, batch: TrainBatch) -> None:
        """Count an update from `update()`."""
        with _hooked(self.ledger, self._policy, FORWARD, HEAD), self.ledger.stage(UPDATE_REST):
            update(batch)

    def prompts(self) -> PromptBatch:
        """Return the step's prompts, all different."""
        length, count = self.config.data.max_prompt_tokens, self.config.trainer.prompts_per_step
        vocab = self._policy.base.config.get_text_config().vocab_size
        tokens = (tuple((row + column * column) % vocab for column in range(length)) for row in range(count))
        return PromptBatch(tuple(Prompt(str(row), "", ids, None, {}) for row, ids in enumerate(tokens)))

    def generate(self) -> None:
        """Count the generation of the step's responses."""
        ledger = self.ledger
        sampled = ledger.staged(SAMPLER, decoding.draw)
        with (
            patch.object(decoding, "draw", sampled),
            patch.object(LeanRows, "prefill", ledger.staged(PREFILL, LeanRows.prefill)),
            patch.object(LeanRows, "compute", ledger.staged(EAGER, LeanRows.compute)),
            ledger.stage(GENERATION_REST),
        ):
            self.engine.generate(self.prompts(), sampling_of(self.config))

    def batch(self) -> TrainBatch:
        """Return the batch of the step's update."""
        prompts, n = self.prompts().prompts, self.config.rollout.n
        length, count = self.config.rollout.max_response_tokens, len(prompts) * n
        tokens = torch.arange(count * length)
        width = len(prompts[0].token_ids)
        return TrainBatch(
            prompt_tokens=torch.tensor([token for prompt in prompts for token in prompt.token_ids]),
            prompt_offsets=torch.arange(len(prompts) + 1) * width,
            prompt_index=torch.arange(len(prompts)).repeat_interleave(n),
            tokens=(tokens + tokens // length) % self._policy.base.config.get_text_config().vocab_size,
            offsets=torch.arange(count + 1) * length,
            advantages=1.0 - 2.0 * (torch.arange(count) % 2),
            logprobs=torch.zeros(count * length),
        )

    def update(self) -> PolicyUpdate:
        """Return the step's update, whose optimizer has its states already."""
        ledger, strategy = self.ledger, Single(self._device.torch_device, "")
        strategy.wrap(self._policy, self.config)
        for parameter in self._policy.parameters():
            if parameter.requires_grad:
                strategy.set_zero_gradient(parameter)
        strategy.step(0.0)
        for name, stage in (("backward", BACKWARD), ("clip_gradients", CLIP), ("step", OPTIMIZER)):
            setattr(strategy, name, ledger.staged(stage, getattr(strategy, name)))
        return PolicyUpdate(
            self.config, strategy, self._policy, self._device.torch_device, self._layout, total_updates=1
        )

    def _score(self, update: PolicyUpdate, reference: Reference, batch: TrainBatch) -> TrainBatch:
        scorer = _hooked(self.ledger, reference.policy, REFERENCE, REFERENCE_HEAD)
        with scorer, self.ledger.stage(REFERENCE_REST):
            return update.with_ref_logprobs(batch, reference)


@contextmanager
def _hooked(ledger: KernelLedger, policy: PolicyModel, passes: str, head: str) -> Iterator[None]:
    """Count the passes of a policy, and its LM head, in stages of their own within the block."""
    hooks: list[Any] = []
    for module, name in ((policy, passes), (policy.base.get_output_embeddings(), head)):
        stack = ExitStack()

        def enter(*_: Any, stack: ExitStack = stack, name: str = name) -> None:
            stack.enter_context(ledger.stage(name))

        def leave(*_: Any, stack: ExitStack = stack) -> None:
            stack.close()

        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def count_step(config: Config, ledger: KernelLedger, backend: Backend) -> dict[str, Stage]:
    """Count the kernels of one step of a recipe; return the stages in the order of a step.

    Raises:
        ConfigError: the settings do not suit the model or the device, or Triton kernels cannot be selected here.
    """
    with ledger.counting(backend) as device:
        LedgerStep(config, ledger, device, backend).run()
    return {name: ledger.stages[name] for name in STAGES if name in ledger.stages}
