"""The local engine: samples and scores with the training model, or with a copy in the compute dtype."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any

import numpy as np
import torch
from hwgrpo_backends.graphs import Recorder
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hwgrpo.models.lora import has_adapters
from hwgrpo.ragged import offsets_of
from hwgrpo.rollout.counter_rng import stream_keys
from hwgrpo.rollout.deadlines import GroupDeadlines, Overdue
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.local.architectures import describe_fallback, slow_dtype, unsupported_reason
from hwgrpo.rollout.local.decode_drift import LENGTH, describe_drift
from hwgrpo.rollout.local.decode_rows import DistinctRows, ModelRows, Rows, check_cache
from hwgrpo.rollout.local.decoding import Decoded, decode
from hwgrpo.rollout.local.frozen_copy import copy_frozen, refresh
from hwgrpo.rollout.local.graph_fallback import DecodeGraphs, graph_recorder
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.rollout.local.lean_step_check import check_lean_step
from hwgrpo.rollout.pause_gate import Gate
from hwgrpo.rollout.policy_weights import copy_weights
from hwgrpo.rollout.requests import check_batch
from hwgrpo.rollout.stopping import StopDetector, end_token_ids
from hwgrpo.values import Completions, Prompt, PromptBatch, Sampling

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
        max_sequences: responses decoded together; a larger batch is generated in parts.
        recorder: makes device graphs. With one, the lean step is recorded, if its startup check passes.
        graphs_required: a recording that fails is an error; otherwise decoding goes on without device graphs.
        weights: with a sharded policy: yields its full trainable parameters with their names; `model` is then a copy
            that only this engine uses (`copy_frozen`), and every rank calls `update_weights`.
        gate: at which a generating thread pauses, between two tokens, for new weights. The KV cache keeps the values
            computed with older weights.
        longest: longest sequence that will be requested, in tokens, prompt and response; None: unknown.

    Raises:
        ConfigError: with its cache the model's logits differ from those without.
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
    ) -> None:
        assert max_sequences >= 1
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
        self._shares_weights = dtypes == {compute_dtype}
        self._copy = None if self._shares_weights else copy_frozen(model, compute_dtype, share=True)
        self.metrics: Mapping[str, float] = {}
        """Of the last `generate`: perf/rollout_tokens_per_second (response tokens) and perf/rollout_live_rows (share
        of the drawn tokens that were kept)."""
        sampler = self._sampler
        with torch.no_grad(), _evaluating(sampler):
            self._supports_padding = check_cache(sampler, device, longest)
            self._unsupported = check_lean_step(sampler, device)
            self._graphs = DecodeGraphs(recorder, graphs_required)
            if self._unsupported is None:
                self._graphs.check(sampler, device)
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
        return tuple(note for note in (path, self._graphs.note, alone, self._drift, slow) if note)

    def _describe_drift(self, sampler: PreTrainedModel, longest: int | None) -> str | None:
        lean = self._unsupported is None and unsupported_reason(sampler, longest or LENGTH) is None

        def make_rows(prompts: Sequence[Sequence[int]], steps: int) -> Rows:
            device = self._device
            return LeanRows(sampler, prompts, device, steps) if lean else ModelRows(sampler, prompts, device)

        return describe_drift(sampler, make_rows, self._device, longest)

    @property
    def _sampler(self) -> PreTrainedModel:
        return self._copy if self._copy is not None else self._model

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        """Return `sampling.n` responses per prompt, ordered by prompt, then by sample.

        Prompts with the same tokens share one prefill. A group is split only when n exceeds `max_sequences`; then its
        prompt is prefilled once per part.

        Raises:
            ConfigError: prompt and response do not fit the model, or a stop token is not in its vocabulary.
            DataError: a prompt has no tokens.
            RunError: the model's logits are not finite.
        """
        if not self._usable:
            raise RuntimeError("the local engine is asleep or closed: call update_weights() before generate()")
        assert len(batch) > 0
        check_batch(batch, [sampling] * len(batch), self._model.config)
        start = time.perf_counter()
        model = self._sampler
        longest = max(len(prompt.token_ids) for prompt in batch.prompts) + sampling.max_response_tokens
        self.decode_reason = self._unsupported or unsupported_reason(model, longest) or ""
        texts: list[str] = []
        parts: list[Decoded] = []
        deadlines = GroupDeadlines(len(batch), sampling.group_timeout)
        with torch.no_grad(), _evaluating(model), deadlines.reported():
            for prompts, samples in self._parts(batch, sampling.n):
                overdue = deadlines.decoding(len(texts), len(samples), sampling.n)
                decoded, part_texts = self._generate_part(model, prompts, samples, sampling, overdue)
                parts.append(decoded)
                texts += part_texts
        lengths = torch.from_numpy(np.concatenate([part.lengths for part in parts]))
        self.metrics = {
            "perf/rollout_tokens_per_second": int(lengths.sum()) / max(time.perf_counter() - start, 1e-9),
            "perf/rollout_live_rows": int(lengths.sum()) / sum(part.rows_decoded for part in parts),
        }
        columns: dict[str, Any] = {
            name: torch.from_numpy(np.concatenate([part.per_token[name] for part in parts]))
            for name in parts[0].per_token
        }
        oldest, newest = (int(version) for version in columns["versions"].aminmax())
        if oldest == newest:
            del columns["versions"]
        completions = Completions(
            prompt_index=torch.arange(len(batch)).repeat_interleave(sampling.n),
            offsets=offsets_of(lengths),
            finished=torch.from_numpy(np.concatenate([part.finished for part in parts])),
            texts=tuple(texts),
            weight_version=oldest,
            **columns,
        )
        return deadlines.apply(completions)

    def update_weights(self, version: int) -> None:
        """Apply the policy's current weights, whose version is `version`."""
        self._version = version
        if self._weights is not None:
            copy_weights(self._weights(), self._model)
        if self._copy is not None:
            refresh(self._model, self._copy)
        elif not self._shares_weights:
            self._copy = copy_frozen(self._model, self._dtype, share=True)
        self._usable = True

    def score(self, sequences: Sequence[Sequence[int]], *, adapter: bool = True) -> list[list[float]] | None:
        """Return log-probs by the engine's own weights, as `scoring.score`; None where it has the policy's."""
        with _evaluating(self._sampler):
            own = self._copy is not None or self._weights is not None
            return score(self._sampler, sequences, adapter=adapter) if own else None

    def sleep(self) -> None:
        """Free the copy of the weights, where there is one."""
        self._usable = False
        self._copy = None

    def health(self) -> bool:
        """Return whether the engine is awake."""
        return self._usable

    def close(self) -> None:
        """Free the copy of the weights; the policy itself stays as it is."""
        self.sleep()

    def _parts(self, batch: PromptBatch, n: int) -> Iterator[tuple[list[Prompt], list[int]]]:
        """Yield the prompt and sample index of each response, in parts of at most `max_sequences`, by full groups."""
        groups = max(1, self._max_sequences // n)
        batchable = [[*prompts] for _, prompts in groupby(batch.prompts, key=self._batching_key)]
        for prompts in (run[start : start + groups] for run in batchable for start in range(0, len(run), groups)):
            sequences = [(prompt, sample) for prompt in prompts for sample in range(n)]
            for cut in range(0, len(sequences), self._max_sequences):
                part = sequences[cut : cut + self._max_sequences]
                yield [prompt for prompt, _ in part], [sample for _, sample in part]

    def _apply_new_weights(self) -> int:
        if self._gate is not None:
            self._gate.step()
        return self._version

    def _batching_key(self, prompt: Prompt) -> int:
        """Return the key that neighbours must share to be decoded together."""
        return 0 if self._supports_padding else len(prompt.token_ids)

    def _generate_part(
        self, model: PreTrainedModel, prompts: list[Prompt], samples: list[int], sampling: Sampling, overdue: Overdue
    ) -> tuple[Decoded, list[str]]:
        distinct = {token_ids: row for row, token_ids in enumerate(dict.fromkeys(p.token_ids for p in prompts))}
        end_ids = end_token_ids(self._tokenizer, self._model.generation_config, sampling.stop_token_ids)
        watch = StopDetector(self._tokenizer, end_ids, sampling.stop, len(prompts), sampling.skip_special_tokens)
        decoded = decode(
            self._rows(model, list(distinct), sampling),
            np.array([distinct[prompt.token_ids] for prompt in prompts]),
            stream_keys(sampling.seed, [prompt.uid for prompt in prompts], samples),
            sampling,
            watch,
            self._device,
            sync_every=1 if self._device.type == "cpu" else SYNC_EVERY,
            apply_new_weights=self._apply_new_weights,
            overdue=overdue,
        )
        tokens, ends = decoded.per_token["tokens"].tolist(), np.cumsum(decoded.lengths).tolist()
        bounds = zip([0, *ends], ends, decoded.finished.tolist())  # one shorter: the responses
        return decoded, [watch.text(tokens[start:end], finished) for start, end, finished in bounds]

    def _rows(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Rows:
        steps = sampling.max_response_tokens
        if self._graphs.active and not self.decode_reason:
            return self._graphs.rows(LeanRows(model, prompts, self._device, steps, fixed=True), steps)
        lean = not self.decode_reason
        rows = LeanRows(model, prompts, self._device, steps) if lean else ModelRows(model, prompts, self._device)
        return DistinctRows(rows) if self._device.type == "cpu" else rows


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
        max_sequences=rollout.max_sequences,
        recorder=graph_recorder(rollout.graphs, parts.device, deterministic=parts.config.trainer.deterministic),
        graphs_required=rollout.graphs is True,
        weights=None if parts.replica is None else parts.weights.trainable,
        gate=parts.gate,
        longest=longest,
    )


@torch.no_grad()
def score(model: Any, sequences: Sequence[Sequence[int]], *, adapter: bool = True) -> list[list[float]]:
    """Return the log-probs of each sequence's tokens after the first, at temperature 1.

    Args:
        model: a transformers causal LM in evaluation mode, or one wrapped by peft.
        sequences: token ids, all of one length.
        adapter: with the adapters, if there are any.
    """
    tokens = torch.tensor([list(tokens) for tokens in sequences], device=next(model.parameters()).device)
    with model.disable_adapter() if has_adapters(model) and not adapter else nullcontext():
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].tolist()
