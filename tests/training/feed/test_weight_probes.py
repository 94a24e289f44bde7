"""Probes of applied weights: what an engine does wrong is found and named, and rounding is not taken for it."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwgrpo.config.schema import LoraConfig
from hwgrpo.errors import RunError
from hwgrpo.models.lora import apply_lora
from hwgrpo.rollout.local import engine as local_engine
from hwgrpo.rollout.policy_weights import ModuleWeights
from hwgrpo.rollout.server.vllm import vllm_server
from hwgrpo.rollout.vllm import engine as vllm_engine
from hwgrpo.rollout.vllm.engine import VllmEngine
from hwgrpo.training.feed import weight_probes
from hwgrpo.training.feed.weight_probes import (
    LENGTH,
    SEQUENCES,
    Precision,
    Scores,
    WeightProbes,
    find_problem,
    probe_sequences,
)
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from tests.rollout.served import TOKENIZER, parts_for
from tests.support.models.steps import update_of
from tests.support.models.tiny import settings, tiny_qwen3
from tests.support.runs import runs
from tests.support.servers.fake_server import TOKEN
from tests.training.feed.scoring_engines import EngineModel, LoraRequest, ScoringLlm, ScoringServer

STEP = 0.02
"""A step of training, as a share of a weight's size."""


@dataclass
class Trained:
    """A policy in training, and an engine that is sent its weights."""

    policy: Any
    engine: Any
    model: EngineModel
    probes: WeightProbes
    version: int = -1

    def sync(self) -> float:
        """Send the weights and probe them; return the difference."""
        self.version += 1
        self.engine.update_weights(self.version)
        metrics = self.probes.check(self.version)
        assert metrics is not None
        return metrics["rollout/probe_logprob_diff"]

    @torch.no_grad()
    def train(self, size: float = STEP) -> None:
        generator = torch.Generator().manual_seed(self.version + 1)
        for parameter in self.policy.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(size * (0.05 + parameter.std(correction=0)) * noise)


@pytest.fixture
def make(tmp_path, monkeypatch):
    closed: list[Callable[[], None]] = []

    def make(kind: str, *overrides: str, adapted: bool = False, dtype: torch.dtype = torch.float32) -> Trained:
        model = tiny_qwen3(vocab=len(TOKENIZER))
        policy: Any = apply_lora(model, LoraConfig(rank=4)) if adapted else model
        own = EngineModel(policy, dtype)
        words = (*(["model.lora.rank=4"] if adapted else []), *overrides)
        if kind == "vllm":
            fake = SimpleNamespace(
                LLM=lambda **arguments: ScoringLlm(own),
                SamplingParams=lambda **given: SimpleNamespace(**given),
                __version__="0",
            )
            monkeypatch.setattr(vllm_engine, "_load", lambda config, device: fake)
            monkeypatch.setattr("hwgrpo.rollout.vllm.vllm_settings.resolve_model_path", lambda path: path)
            monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=LoraRequest))
            new = VllmEngine
            parts = replace(parts_for(None, tmp_path), config=settings("rollout.engine=vllm", *words))
        else:
            monkeypatch.setenv("THE_TOKEN", TOKEN)
            server = ScoringServer(own)
            closed.append(server.close)
            new = vllm_server
            parts = parts_for(server.url, tmp_path, *words)
        parts = replace(parts, model=policy, weights=ModuleWeights(policy), compute_dtype=dtype)
        engine = new(parts)
        closed.insert(0, engine.close)
        options = HeadOptions(temperature=parts.config.rollout.temperature)
        update = update_of(PolicyModel(policy, compute_dtype=dtype, options=options), parts.config)
        return Trained(policy, engine, own, WeightProbes(parts.config, engine, update, TOKENIZER))

    yield make
    for close in closed:
        close()


KINDS = ("vllm", "vllm_server")


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_that_applies_its_weights_is_never_accused(make, kind: str, adapted: bool, dtype: torch.dtype):
    words = ("rollout.temperature=0.7", f"model.dtype={str(dtype).removeprefix('torch.')}")
    trained = make(kind, *words, adapted=adapted, dtype=dtype)
    gaps = [trained.sync()]
    for size in (0.0, 1e-7, 1e-4, 1e-3, STEP, STEP, 0.3):
        trained.train(size)
        gaps.append(trained.sync())
    assert max(gaps) < (1e-5 if dtype == torch.float32 else 0.3)
    assert len(set(gaps)) > 4, "the weights have changed"


FAULTS = {
    "weights not applied": "policy's weights",
    "one tensor stale": "policy's weights",
    "one flipped bit": "policy's weights",
    "adapter not applied": "policy's adapter",
    "adapter applied twice": "policy's adapter",
    "another adapter": "policy's adapter",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_are_sent_and_not_applied_end_the_run(make, kind: str, fault: str):
    trained = make(kind, adapted="adapter" in fault)
    trained.sync()
    trained.train()
    trained.sync()
    trained.model.faults = {fault}
    trained.train()
    told = rf"does not sample with the {FAULTS[fault]} of version 2: on 4 fixed sequences .*newest checkpoint"
    with pytest.raises(RunError, match=told):
        trained.sync()


@pytest.mark.parametrize("lost", [0, 1])
def test_each_of_several_servers_is_probed_and_the_wrong_one_named(tmp_path, monkeypatch, lost: int):
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    model = tiny_qwen3(vocab=len(TOKENIZER))
    models = [EngineModel(model, torch.float32) for _ in range(3)]
    servers = [ScoringServer(each) for each in models]
    urls = f"rollout.server.url=[{','.join(server.url for server in servers)}]"
    parts = parts_for(None, tmp_path, urls, "rollout.probe_every=1", "rollout.server.start_timeout=0.5")
    engine = vllm_server(replace(parts, model=model, weights=ModuleWeights(model)))
    update = update_of(PolicyModel(model, compute_dtype=torch.float32, options=HeadOptions()), parts.config)
    source: Any = SimpleNamespace(exclusive_engine=nullcontext, update_weights=engine.update_weights)
    probes = weight_probes.probe_weights(parts.config, source, engine, update, TOKENIZER, 0)
    assert probes is not None
    trained = Trained(model, engine, models[2], None)  # pyright: ignore
    for version in (1, 2):
        trained.train()
        probes.send_weights(version)
    servers[lost].close()
    trained.train()
    probes.send_weights(3)
    assert not engine._servers[lost].ready, "the others are probed"
    models[2].faults = {"weights not applied"}
    trained.train()
    with pytest.raises(RunError, match=rf"server at {servers[2].url} does not sample with the policy's weights of ver"):
        probes.send_weights(4)
    for each in (engine, *servers):
        each.close()


@pytest.mark.parametrize("adapted", [False, True])
def test_a_server_that_was_started_again_and_serves_the_weights_of_its_folder_ends_the_run(make, adapted: bool):
    trained = make("vllm_server", adapted=adapted)
    trained.sync()
    trained.train()
    trained.sync()
    trained.model.restart()
    with pytest.raises(RunError, match=f"policy's {'adapter' if adapted else 'weights'} of version 1"):
        trained.probes.check(1)


@pytest.mark.parametrize("kind", KINDS)
def test_below_an_adapter_the_base_model_is_named_where_it_is_wrong(make, kind: str):
    trained = make(kind, adapted=True)
    trained.sync()
    trained.train()
    trained.model.damage_base()
    with pytest.raises(RunError, match="policy's base model of version 1"):
        trained.sync()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_were_wrong_from_the_start_are_noticed_at_the_first_probe(make, kind: str):
    trained = make(kind)
    trained.model.faults = {"weights not applied"}
    trained.train()
    with pytest.raises(RunError, match=r"policy's weights of version 0: .* differ from the trainer's by"):
        trained.sync()


@pytest.mark.parametrize("fault", ["weights not applied", "adapter not applied"])
def test_in_bf16_the_weights_of_the_version_before_are_noticed_though_rounding_is_larger_than_the_step(make, fault):
    trained = make("vllm", "model.dtype=bfloat16", adapted="adapter" in fault, dtype=torch.bfloat16)
    if "adapter" in fault:
        trained.train(1.0)  # an adapter that does something
    trained.sync()
    trained.train(2e-3)
    trained.sync()
    trained.model.faults = {fault}
    trained.train(2e-3)
    with pytest.raises(RunError, match=r"of version 2: .*from weights 1 on .*and the engine's by nothing at all"):
        trained.sync()


COARSE = Precision(torch.bfloat16, layers=36, width=150_000, vocabulary=150_000)


def scores(name: str, trainer: torch.Tensor, engine: torch.Tensor) -> Scores:
    return Scores(name, trainer, engine)


@pytest.mark.parametrize("change", ["all", "nothing", "twice", "something else"])
def test_a_change_above_the_noise_is_the_same_for_both(change: str):
    generator = torch.Generator().manual_seed(0)

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(4, 15, generator=generator, dtype=torch.float64)

    before = noise(3.0) - 12
    moved, other = noise(0.5), noise(0.5)
    applied = {"all": moved, "nothing": 0 * moved, "twice": 2 * moved, "something else": other}[change]
    earlier = scores("weights 3", before, before + noise(0.02))
    now = scores("weights 4", before + moved, before + applied + noise(0.02))
    assert find_problem(earlier, [], COARSE) is None
    problem = find_problem(now, [earlier], COARSE, 0.02)
    assert find_problem(now, [earlier], COARSE, 0.3) is None, "a change within the noise says nothing"
    if change == "all":
        assert problem is None
    else:
        assert problem is not None
        assert problem.startswith("from weights 3 on the trainer's log-probs have changed by")


def test_log_probs_that_are_not_finite_are_a_problem():
    ours = torch.full((4, 15), -3.0, dtype=torch.float64)
    assert find_problem(scores("weights 0", ours, ours * float("nan")), [], COARSE) is not None
    assert find_problem(scores("weights 0", ours * float("nan"), ours), [], COARSE) is not None


def test_rounding_grows_with_depth_and_with_the_dtype():
    exact = replace(COARSE, dtype=torch.float32)
    assert COARSE.rounding(2.0) == 2 * COARSE.rounding(0.3)
    assert replace(COARSE, layers=144).rounding(1.0) == pytest.approx(2 * COARSE.rounding(1.0), rel=0.02)
    assert exact.rounding(1.0) == COARSE.rounding(1.0, torch.float32) < COARSE.rounding(1.0) / 10


def test_probes_are_ordinary_tokens_of_the_whole_vocabulary_and_always_the_same():
    probes = probe_sequences(TOKENIZER, len(TOKENIZER), 100)
    assert probes == probe_sequences(TOKENIZER, len(TOKENIZER), 100)
    assert [len(tokens) for tokens in probes] == [LENGTH] * SEQUENCES
    tokens = {token for sequence in probes for token in sequence}
    assert not tokens & {*TOKENIZER.all_special_ids}
    assert len(tokens) > SEQUENCES * LENGTH / 2
    assert max(tokens) < len(TOKENIZER)
    assert [len(tokens) for tokens in probe_sequences(TOKENIZER, len(TOKENIZER), 7)] == [7] * SEQUENCES


AHEAD = ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate", "trainer.max_steps=4")


def probed(output) -> dict[int, float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["rollout/probe_logprob_diff"] for line in lines if "rollout/probe_logprob_diff" in line}


def test_a_run_probes_the_first_weights_and_every_kth_and_logs_the_difference_with_the_step_that_used_them(tmp_path):
    assert runs.run(tmp_path / "run", *AHEAD, "rollout.probe_every=2") == "completed"
    found = probed(tmp_path / "run")
    assert [*found] == [1, 3]
    assert max(found.values()) < 1e-5
    runs.run(tmp_path / "off", *AHEAD, "rollout.probe_every=0")
    assert probed(tmp_path / "off") == {}
    without = [
        {name: value for name, value in line.items() if name != "rollout/probe_logprob_diff"}
        for line in runs.metrics(tmp_path / "run")
    ]
    assert without == runs.metrics(tmp_path / "off"), "probes change nothing else"


def test_a_run_whose_sampler_keeps_older_weights_ends_with_an_error(tmp_path, monkeypatch):
    copy = local_engine.copy_weights

    def forgetful(weights, model) -> None:
        copy(weights, model) if len(called) < 2 else [*weights]
        called.append(model)

    called: list[Any] = []
    monkeypatch.setattr(local_engine, "copy_weights", forgetful)
    with pytest.raises(RunError, match=r"does not sample with the policy's weights of version 2.*rollout\.probe_every"):
        runs.run(tmp_path / "run", *AHEAD, "rollout.probe_every=1")


def test_an_engine_that_samples_with_the_policy_itself_is_not_probed(tmp_path):
    runs.run(tmp_path / "run", "rollout.probe_every=1", "trainer.max_steps=2")
    assert probed(tmp_path / "run") == {}


@pytest.mark.parametrize(
    ("experts", "dtype", "probed"), [(0, "bfloat16", True), (8, "bfloat16", False), (8, "float32", True)]
)
def test_a_mixture_in_16_bits_is_not_probed(monkeypatch, experts, dtype, probed):
    asked = []
    monkeypatch.setattr(weight_probes, "WeightProbes", lambda *_: SimpleNamespace(check=asked.append))
    text = SimpleNamespace(num_experts=experts)
    base = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    update: Any = SimpleNamespace(policy=SimpleNamespace(base=base, compute_dtype=getattr(torch, dtype)))
    responses: Any = SimpleNamespace(exclusive_engine=nullcontext)
    engine: Any = None
    assert weight_probes.probe_weights(settings("rollout.engine=vllm"), responses, engine, update, None, 3) is None
    assert asked == [3] * probed
