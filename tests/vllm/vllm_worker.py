"""What an engine on vLLM does, beside the local engine on the same policy; run where vLLM is, by vllm_environment.py.

python vllm_worker.py ENGINE RESULT.json
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.catalog import ENGINES
from hwgrpo.config import load_config
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.models.loading import load_tokenizer
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.local.engine import local_engine
from hwgrpo.rollout.local.token_sampling import filter_logits
from hwgrpo.rollout.policy_weights import ModuleWeights
from hwgrpo.training.feed.weight_probes import WeightProbes
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.shared_setup import load_policy, prepare_process
from hwgrpo.values import Completions, Prompt, PromptBatch, Sampling
from tests.support.models.steps import update_of
from tests.vllm.vllm_environment import EXECUTOR, ONE_PROCESS

UPDATES = 3
DRAWS = 4000
GREEDY = Sampling(n=2, max_response_tokens=12, greedy=True)
DRAWN = Sampling(n=8, max_response_tokens=6, seed=3)
TEXTS = ("sort 312=", "sort 9=", "1", "sort 55142=", "a longer prompt. " * 5 + "sort 421=", "ab" * 40)
"""Prompts of one block of keys and values, and of several."""


class Forgetful(ModuleWeights):
    """The weights of the policy; those of an earlier time where it forgets."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._seen: dict[str, torch.Tensor] = {}
        self.forgets = False

    def full(self) -> Any:
        if not self.forgets:
            self._seen = {name: tensor.clone() for name, tensor in super().full()}
        return iter(self._seen.items())


def parts_of(kind: str, output: str, *overrides: str) -> EngineParts:
    """Return what an engine of a warm-started tiny model is made from."""
    words = [
        "model.path=builtin://tiny?task=sort&head=32&layers=2&steps=60&batch=64",
        "data.train=task://sort",
        "data.max_prompt_tokens=100",
        "rollout.max_response_tokens=16",
        "reward.functions=[exact_match]",
        "trainer.threads=1",
        f"trainer.output_dir={output}",
        f"rollout.engine={kind}",
        *((f"rollout.server.env={json.dumps(ONE_PROCESS)}",) if kind == "vllm_server" else ()),
        EXECUTOR,
        "rollout.kv_cache_gb=0.5",
        "rollout.sleep_mode=always",
        *overrides,
    ]
    config = load_config(None, words)
    device = prepare_process(config, BACKEND, 0, 1)
    tokenizer = load_tokenizer(config.model)
    model = load_policy(config, device, tokenizer).model
    return EngineParts(config, model, Forgetful(model), tokenizer, device, torch.float32)


def prompts(tokenizer: Any, *texts: str) -> PromptBatch:
    """Return prompts of the given texts."""
    made = [
        Prompt(uid=f"{i}:{text}", text=text, token_ids=tuple(tokenizer(text).input_ids), ground_truth=None, columns={})
        for i, text in enumerate(texts)
    ]
    return PromptBatch(tuple(made))


def apart(one: Completions, other: Completions) -> dict[str, Any]:
    """Say in what two sets of completions differ."""
    same = one.tokens.tolist() == other.tokens.tolist() and one.offsets.tolist() == other.offsets.tolist()
    gap = float((one.logprobs - other.logprobs).abs().max()) if same else None
    finished = one.finished.tolist() == other.finished.tolist()
    return {"tokens": same, "logprobs": gap, "texts": one.texts == other.texts, "finished": finished}


@torch.no_grad()
def change(model: torch.nn.Module, seed: int) -> None:
    """Change every trainable weight, by about as much as a few hundred steps of training do."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.1 * parameter.std() + 0.02 if parameter.ndim > 1 else 0.05))


def updates(parts: EngineParts, engine: Any) -> list[dict[str, Any]]:
    """Change the policy again and again; compare with the local engine after every update."""
    found = []
    mine, batch = local_engine(parts), prompts(parts.tokenizer, *TEXTS)
    before = None
    for version in range(1, UPDATES + 1):
        change(parts.model, version)
        engine.update_weights(version)
        theirs, ours = engine.generate(batch, GREEDY), mine.generate(batch, GREEDY)
        row = apart(theirs, ours) | {"version": theirs.weight_version}
        row["changed"] = before != ours.tokens.tolist()
        before = ours.tokens.tolist()
        found.append(row)
    return found


def probes_of(parts: EngineParts, engine: Any) -> WeightProbes:
    """Return probes of an engine, scored by the policy in this process."""
    policy = PolicyModel(parts.model, compute_dtype=torch.float32, options=HeadOptions())
    return WeightProbes(parts.config, engine, update_of(policy, parts.config), parts.tokenizer)


def probed(parts: EngineParts, engine: Any, version: int, forget: Callable[[bool], None]) -> dict[str, Any]:
    """Probe the engine after updates, and after one that it does not get to see; then send that."""
    probes, gaps, message = probes_of(parts, engine), [], ""
    for seed in (7, 8):
        engine.update_weights(version)
        found = probes.check(version)
        assert found is not None
        gaps.append(found["rollout/probe_logprob_diff"])
        change(parts.model, seed)
        version += 1
    forget(True)
    engine.update_weights(version)
    try:
        probes.check(version)
    except RunError as error:
        message = str(error)
    forget(False)
    engine.update_weights(version + 1)
    return {"gaps": gaps, "error": message}


def forgotten(parts: EngineParts, engine: Any, version: int) -> dict[str, Any]:
    """Compare after an update that the engine does not get to see."""
    parts.weights.forgets = True  # pyright: ignore[reportAttributeAccessIssue]
    change(parts.model, 99)
    engine.update_weights(version)
    batch = prompts(parts.tokenizer, *TEXTS)
    row = apart(engine.generate(batch, GREEDY), local_engine(parts).generate(batch, GREEDY))
    parts.weights.forgets = False  # pyright: ignore[reportAttributeAccessIssue]
    engine.update_weights(version + 1)
    return row


def stops(parts: EngineParts, engine: Any) -> list[dict[str, Any]]:
    """Compare how responses end and read."""
    batch = prompts(parts.tokenizer, *TEXTS)
    mine, found = local_engine(parts), []
    free = mine.generate(batch, GREEDY)
    texts = [text for text in free.texts if len(text) > 3]
    ids = [int(token) for token in free.tokens.unique()[:2]]
    for settings in ({"stop": (texts[0][1:3],)}, {"stop": (texts[-1][2], texts[0][1])}, {"stop_token_ids": tuple(ids)}):
        sampling = replace(GREEDY, **settings)
        ours = mine.generate(batch, sampling)
        row = apart(engine.generate(batch, sampling), ours)
        found.append(row | {"shorter": len(ours.tokens) < len(free.tokens), "ended": int(ours.finished.sum())})
    return found


@torch.no_grad()
def first_tokens(parts: EngineParts, engine: Any, **filters: Any) -> dict[str, Any]:
    """Draw many first tokens; return counts, and probabilities as the model has them."""
    batch = prompts(parts.tokenizer, TEXTS[0])
    sampling = Sampling(n=DRAWS, max_response_tokens=1, seed=5, **filters)
    drawn = engine.generate(batch, sampling)
    logits = parts.model(input_ids=torch.tensor([batch.prompts[0].token_ids])).logits[:, -1].float()
    logits = logits / sampling.temperature
    kept = filter_logits(logits, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    expected = kept.log_softmax(-1)[0]
    counts = torch.bincount(drawn.tokens, minlength=len(expected))
    return {
        "counts": counts.tolist(),
        "probabilities": expected.exp().tolist(),
        "logprobs": float((drawn.logprobs - expected[drawn.tokens]).abs().max()),
    }


def repeats(parts: EngineParts, engine: Any) -> dict[str, bool]:
    """Draw again with the same seed, in another order, and with another seed."""
    batch = prompts(parts.tokenizer, *TEXTS)
    first = engine.generate(batch, DRAWN)
    again = engine.generate(batch, DRAWN)
    alone = engine.generate(PromptBatch(batch.prompts[3:4]), DRAWN)
    other = engine.generate(batch, replace(DRAWN, seed=4))
    group = slice(3 * DRAWN.n, 4 * DRAWN.n)
    return {
        "same": first.tokens.tolist() == again.tokens.tolist(),
        "alone": first.texts[group] == alone.texts,
        "other": first.tokens.tolist() == other.tokens.tolist(),
        "distinct": len(set(first.texts[group])) > 1,
    }


def failures(parts: EngineParts, engine: Any, version: int) -> dict[str, str]:
    """Return the messages of what cannot be answered; afterwards the engine works as before."""
    told = {}
    batch = prompts(parts.tokenizer, TEXTS[0])
    try:
        engine.generate(batch, replace(GREEDY, max_response_tokens=5000))
    except ConfigError as error:
        told["too long"] = str(error)
    saved = parts.model.model.norm.weight.detach().clone()
    parts.model.model.norm.weight.data.fill_(float("nan"))
    engine.update_weights(version)
    try:
        engine.generate(batch, replace(DRAWN, n=2))
    except RunError as error:
        told["nan"] = str(error)
    parts.model.model.norm.weight.data.copy_(saved)
    engine.update_weights(version + 1)
    told["after"] = json.dumps(apart(engine.generate(batch, GREEDY), local_engine(parts).generate(batch, GREEDY)))
    return told


def late(parts: EngineParts, engine: Any) -> dict[str, Any]:
    """Draw with a deadline that is met, with one that no response of two tokens meets, and without one again."""
    batch = prompts(parts.tokenizer, *TEXTS)
    first, in_time, dropped, after = (
        engine.generate(batch, replace(DRAWN, group_timeout=seconds)) for seconds in (None, 3600, 1e-6, None)
    )
    return {
        "in time": apart(first, in_time) | {"late": in_time.late, "groups": len(in_time.dropped)},
        "late": dropped.late,
        "dropped": [*dropped.dropped],
        "kept": dropped.prompt_index.unique().tolist(),
        "after": apart(first, after),
    }


class ForgetfulAdapter(ModuleWeights):
    """The weights of a policy with an adapter; its adapter of an earlier time where it forgets."""

    forgets, seen = False, None

    def adapter(self) -> Any:
        if not self.forgets:
            found = super().adapter()
            assert found is not None
            self.seen = replace(found, tensors={name: tensor.clone() for name, tensor in found.tensors.items()})
        return self.seen


def adapters(kind: str, output: str) -> dict[str, Any]:
    """Compare after updates of an adapter alone."""
    parts = parts_of(kind, output, "model.lora.rank=4")
    weights = ForgetfulAdapter(parts.model)
    parts = replace(parts, weights=weights)
    engine = ENGINES.load(kind).make(parts)
    try:
        found = updates(parts, engine)
        probes = probed(parts, engine, UPDATES + 1, lambda forgets: setattr(weights, "forgets", forgets))
        return {"updates": found, "probes": probes}
    finally:
        engine.close()


def main(kind: str, result: str) -> None:
    """Collect everything and write it down."""
    with tempfile.TemporaryDirectory() as output:
        parts = parts_of(kind, output)
        torch.manual_seed(1)
        random.seed(1)
        before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
        engine = ENGINES.load(kind).make(parts)
        after = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
        batch = prompts(parts.tokenizer, *TEXTS)
        found: dict[str, Any] = {
            "undisturbed": torch.equal(before[0], after[0]) and before[1:] == after[1:],
            "notes": list(engine.notes),
            "at the start": apart(engine.generate(batch, GREEDY), local_engine(parts).generate(batch, GREEDY)),
            "updates": updates(parts, engine),
            "forgotten": forgotten(parts, engine, UPDATES + 1),
            "probes": probed(parts, engine, UPDATES + 3, lambda forgets: setattr(parts.weights, "forgets", forgets)),
            "stops": stops(parts, engine),
            "plain": first_tokens(parts, engine),
            "filtered": first_tokens(parts, engine, temperature=0.7, top_k=5, top_p=0.9),
            "repeats": repeats(parts, engine),
            "drawn": engine.generate(batch, DRAWN).tokens.tolist(),
            "late": late(parts, engine),
            "failures": failures(parts, engine, UPDATES + 7),
            "metrics": dict(engine.metrics),
        }
        engine.sleep()
        found["asleep"] = engine.health()
        engine.update_weights(UPDATES + 4)
        found["awake"] = apart(engine.generate(batch, GREEDY), local_engine(parts).generate(batch, GREEDY))
        engine.close()
        found["closed"] = engine.health()
        found["adapters"] = adapters(kind, output)
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
