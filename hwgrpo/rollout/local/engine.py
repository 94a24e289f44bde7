"""The local engine: samples and scores with the training model, or with a copy in the compute dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from hwgrpo_backends.graphs import Recorder
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hwgrpo.config.derived import sequences_at_once
from hwgrpo.models.lora import has_adapters
from hwgrpo.models.vision import ImageEncoder, image_encoder, own_logits
from hwgrpo.rollout.deadlines import GroupDeadlines
from hwgrpo.rollout.engine import TurnRequest
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.local.architectures import describe_fallback, slow_dtype, unsupported_reason
from hwgrpo.rollout.local.decode_drift import LENGTH, describe_drift
from hwgrpo.rollout.local.decode_rows import DistinctRows, ModelRows, Rows, check_cache
from hwgrpo.rollout.local.decode_session import DecodeSession
from hwgrpo.rollout.local.decoding import Decoder, Settings
from hwgrpo.rollout.local.frozen_copy import copy_frozen, refresh
from hwgrpo.rollout.local.graph_fallback import DecodeGraphs, graph_recorder
from hwgrpo.rollout.local.image_check import check_images
from hwgrpo.rollout.local.kernel_fallback import DecodeKernels
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.rollout.local.lean_step_check import check_lean_step
from hwgrpo.rollout.local.merged_adapters import MERGED_IN_16_BITS, merge, unshared_parameters
from hwgrpo.rollout.local.packed_weights import packed_weights
from hwgrpo.rollout.local.slot_scheduler import PREFILL_AHEAD
from hwgrpo.rollout.pause_gate import Gate
from hwgrpo.rollout.policy_weights import copy_weights
from hwgrpo.rollout.requests import check_batch
from hwgrpo.rollout.stopping import StopDetector, end_token_ids
from hwgrpo.values import Completions, Prompt, PromptBatch, PromptImages, Sampling

SYNC_EVERY = 8
"""Steps between reads of the tokens that an accelerator has drawn; each read waits for it."""


class LocalEngine:
    """Engine that samples in this process, on the training device.

    Supported architectures are decoded by the lean step, if it reproduces the model's logits on a few tokens; all
    others by the model's own forward. See `decode_path` and `decode_reason`.

    Args:
        model: the policy; may be wrapped by peft. Its parameters must be unsharded on this rank; where the policy's
            are sharded, a replica.
        tokenizer: decodes responses and knows the end-of-sequence token.
        device: where the model is.
        compute_dtype: dtype of the weights used for sampling. Parameters in this dtype are shared; others are copied,
            and the copies refreshed by `update_weights`.
        max_sequences: responses decoded together, each in a slot; the others wait until one is free.
        recorder: makes device graphs. With one, the lean step is recorded, if its startup check passes.
        graphs_required: a recording that fails is an error; otherwise decoding goes on without device graphs.
        weights: with a sharded policy: yields its full trainable parameters with their names; `model` is then a copy
            that only this engine uses (`copy_frozen`), and every rank calls `update_weights`.
        gate: at which a generating thread pauses, between two tokens, for new weights. The KV cache keeps the values
            computed with older weights.
        longest: longest sequence that will be requested, in tokens, prompt and response; None: unknown.
        merge_adapters: sample with a copy of the adapted weights in which the adapters are merged.
        image_sample: a prompt with an image, for startup checks; None: there is none.

    Raises:
        ConfigError: with its cache the model's logits differ from those without, or no adapter can be merged.
        RunError: the recorder fails, and graphs are required.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        max_sequences: int,
        recorder: Recorder | None = None,
        graphs_required: bool = True,
        weights: Callable[[], Iterator[tuple[str, torch.Tensor]]] | None = None,
        gate: Gate | None = None,
        longest: int | None = None,
        merge_adapters: bool = False,
        image_sample: Prompt | None = None,
    ) -> None:
        assert max_sequences >= 1
        self._merges = merge_adapters
        self._weights = weights
        self._gate = gate
        self._model = model
        self._tokenizer = tokenizer
        self._device = device
        self._dtype = compute_dtype
        self._max_sequences = max_sequences
        self._version = 0
        self._usable = True
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        self._shares_weights = dtypes == {compute_dtype} and not merge_adapters
        self._copy = None if self._shares_weights else self._make_copy()
        self.metrics: Mapping[str, float] = {}
        """Of the last session or `generate` (`DecodeSession.close`)."""
        self._packed = packed_weights(device.type, compute_dtype)
        sampler = self._sampler
        with torch.no_grad(), _evaluating(sampler):
            self._supports_padding = check_cache(sampler, device, longest)
            if image_sample is not None:
                check_images(sampler, device, image_sample, supports_padding=self._supports_padding)
                if (encoder := image_encoder(sampler)) is not None:
                    encoder.sample = image_sample
            self._unsupported = check_lean_step(sampler, device, packed=self._packed)
            self._kernels = DecodeKernels(partial(check_lean_step, kernels=True, packed=self._packed))
            self._graphs = DecodeGraphs(recorder, graphs_required)
            if self._unsupported is None:
                self._kernels.check(sampler, device)
                self._graphs.check(sampler, device, self._kernels)
            self._drift = self._describe_drift(sampler, longest)
        self._expected_reason = self._unsupported or (unsupported_reason(sampler, longest) if longest else None)
        self.decode_reason = self._unsupported or ""
        """Why the lean step did not decode; empty when it did. Updated by each `generate`."""

    @property
    def decode_path(self) -> str:
        """Decode path of the last or next `generate`: "graph" (the lean step, recorded), "lean" or "model"."""
        if self.decode_reason:
            return "model"
        return "graph" if self._graphs.active else "lean"

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about the speed of this engine."""
        slow = slow_dtype(self._device, self._dtype)
        path = describe_fallback(self._expected_reason) if self._expected_reason else ""
        alone = (
            ""
            if self._supports_padding
            else ("rollout decodes prompts of one length at a time: the model does not mask padding in its states")
        )
        merged = MERGED_IN_16_BITS if self._merges and self._dtype.itemsize == 2 else ""
        return tuple(
            note for note in (path, merged, self._kernels.note, self._graphs.note, alone, self._drift, slow) if note
        )

    @property
    def images(self) -> ImageEncoder | None:
        """What encodes the images of prompts; None: the model reads text alone."""
        return image_encoder(self._sampler)

    def _describe_drift(self, sampler: PreTrainedModel, longest: int | None) -> str | None:
        lean = self._unsupported is None and unsupported_reason(sampler, longest or LENGTH) is None

        def make_rows() -> Rows:
            return self._lean_rows(sampler) if lean else ModelRows(sampler, self._device)

        return describe_drift(sampler, make_rows, self._device, longest)

    @property
    def _sampler(self) -> PreTrainedModel:
        return self._copy if self._copy is not None else self._model

    def _make_copy(self) -> PreTrainedModel:
        own = unshared_parameters(self._model) if self._merges else ()
        copied = copy_frozen(self._model, self._dtype, share=True, own=own)
        if self._merges:
            merge(self._model, copied)
        return copied

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        """Return `sampling.n` responses per prompt, ordered by prompt, then by sample; it raises as `generate_each`."""
        return self.generate_each(batch, [sampling] * len(batch))

    def generate_each(self, batch: PromptBatch, samplings: Sequence[Sampling]) -> Completions:
        """Return the responses to each prompt with its own settings, ordered by prompt, then by sample.

        Responses are decoded in at most `max_sequences` slots, which are refilled (`Decoder`). Prompts with the same
        tokens share one prefill. A prompt whose first response gets its slot after an update of the weights is
        prefilled with the new ones; so is one of which some responses are decoded already, for the others.

        Raises:
            ConfigError: prompt and response do not fit the model, or a stop token is not in its vocabulary.
            DataError: a prompt has no tokens.
            RunError: the model's logits are not finite.
        """
        self._check_usable()
        assert len(batch) > 0
        longest = max(
            len(prompt.token_ids) + sampling.max_response_tokens
            for prompt, sampling in zip(batch.prompts, samplings, strict=True)
        )
        with closing(self.open_session(longest, group_timeout=samplings[0].group_timeout)) as session:
            session.submit([TurnRequest(*pair) for pair in zip(batch.prompts, samplings, strict=True)])
            while session.busy:
                session.advance()
            return session.take(range(len(batch)))

    def open_session(self, longest: int, *, room: int = 0, group_timeout: float | None = None) -> DecodeSession:
        """Return a session (`rollout.engine.Session`), whose requests share this engine's slots.

        Keys and values of ended turns are kept for as many tokens as the slots may hold, or a GiB. The model's own
        forward keeps none: see `decode_reason`.

        Args:
            longest: most tokens of a prompt and its response, all turns included.
            room: most tokens of a response, all turns included; 0: those of its first request.
            group_timeout: seconds after which a request is late.
        """
        self._check_usable()
        model = self._sampler
        self.decode_reason = self._unsupported or unsupported_reason(model, longest) or ""
        deadlines = GroupDeadlines(0, group_timeout)
        kinds: list[Settings] = []
        decoder = Decoder(
            self._rows(model, room),
            self._max_sequences,
            self._device,
            kinds,
            sync_every=1 if self._device.type == "cpu" else SYNC_EVERY,
            apply_new_weights=self._apply_new_weights,
            supports_padding=self._supports_padding,
            prefill_ahead=-(-self._max_sequences // PREFILL_AHEAD),
            admitted=lambda request: deadlines.dispatch(request.group),
            longest=longest,
        )
        return DecodeSession(
            decoder,
            kinds,
            deadlines,
            slots=self._max_sequences,
            settings_of=self._settings,
            check=lambda batch, samplings: check_batch(batch, samplings, self._model.config),
            closed=self._report,
            active=_evaluating(model),
        )

    def _report(self, metrics: Mapping[str, float]) -> None:
        self.metrics = metrics

    def _check_usable(self) -> None:
        if not self._usable:
            raise RuntimeError("the local engine is asleep or closed: call update_weights() before generate()")

    def update_weights(self, version: int) -> None:
        """Apply the policy's current weights, whose version is `version`."""
        self._version = version
        if self._weights is not None:
            copy_weights(self._weights(), self._model)
        if self._copy is not None:
            refresh(self._model, self._copy)
            if self._merges:
                merge(self._model, self._copy)
        elif not self._shares_weights:
            self._copy = self._make_copy()
        self._usable = True

    def score(
        self, sequences: Sequence[Sequence[int]], *, adapter: bool = True, images: PromptImages | None = None
    ) -> list[list[float]] | None:
        """Return log-probs by the engine's own weights, as `score` of this module; None where it has the policy's.

        None, too, without merged adapters.
        """
        if self._merges and not adapter:
            return None
        with _evaluating(self._sampler):
            own = self._copy is not None or self._weights is not None
            return score(self._sampler, sequences, adapter=adapter, images=images) if own else None

    def sleep(self) -> None:
        """Free the copy of the weights, where there is one."""
        self._usable = False
        self._copy = None
        self._packed = packed_weights(self._device.type, self._dtype)

    def health(self) -> bool:
        """Return whether the engine is awake."""
        return self._usable

    def close(self) -> None:
        """Free the copy of the weights; the policy itself stays as it is."""
        self.sleep()

    def _apply_new_weights(self) -> int:
        if self._gate is not None:
            self._gate.step()
        return self._version

    def _settings(self, sampling: Sampling) -> Settings:
        end_ids = end_token_ids(self._tokenizer, self._model.generation_config, sampling.stop_token_ids)
        return Settings(sampling, StopDetector(self._tokenizer, end_ids, sampling.stop, sampling.skip_special_tokens))

    def _rows(self, model: PreTrainedModel, room: int) -> Rows:
        if self._graphs.active and not self.decode_reason:
            return self._graphs.rows(self._lean_rows(model, fixed=True, room=room))
        rows = ModelRows(model, self._device) if self.decode_reason else self._lean_rows(model, room=room)
        return DistinctRows(rows) if self._device.type == "cpu" else rows

    def _lean_rows(self, model: PreTrainedModel, fixed: bool = False, room: int = 0) -> LeanRows:
        return LeanRows(model, self._device, fixed=fixed, kernels=self._kernels.active, room=room, packed=self._packed)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Set all modules to evaluation mode, and restore those that were training afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def local_engine(parts: EngineParts) -> LocalEngine:
    """Return an engine that samples with the training model, or with a copy in this process."""
    rollout = parts.config.rollout
    longest = parts.config.data.max_prompt_tokens + rollout.max_response_tokens
    return LocalEngine(
        parts.model if parts.replica is None else parts.replica,
        parts.tokenizer,
        device=parts.device.torch_device,
        compute_dtype=parts.compute_dtype,
        max_sequences=sequences_at_once(rollout),
        recorder=graph_recorder(rollout.graphs, parts.device, deterministic=parts.config.trainer.deterministic),
        graphs_required=rollout.graphs is True,
        weights=None if parts.replica is None else parts.weights.trainable,
        gate=parts.gate,
        longest=longest,
        merge_adapters=rollout.merge_adapters,
        image_sample=parts.image_sample,
    )


@torch.no_grad()
def score(
    model: Any, sequences: Sequence[Sequence[int]], *, adapter: bool = True, images: PromptImages | None = None
) -> list[list[float]]:
    """Return the log-probs of each sequence's tokens after the first among all tokens, at temperature 1.

    Args:
        model: a transformers causal LM in evaluation mode, or one wrapped by peft.
        sequences: token ids, all of one length.
        adapter: with the adapters, if there are any.
        images: of each sequence; the model reads their pixels.
    """
    tokens = torch.tensor([list(tokens) for tokens in sequences], device=next(model.parameters()).device)
    with model.disable_adapter() if has_adapters(model) and not adapter else nullcontext():
        if images is None:
            logits = model(input_ids=tokens, use_cache=False).logits
        else:
            logits = torch.stack([own_logits(model, each, images) for each in sequences])
    return logits[:, :-1].float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].tolist()
