"""What the engine in the training process says to vLLM, to one that is not there; tests/vllm has the real one."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.rollout import deadlines
from hwgrpo.rollout.vllm import engine as vllm_engine
from hwgrpo.rollout.vllm.engine import VllmEngine
from hwgrpo.values import Sampling
from tests.rollout.served import SAMPLING, TOKENIZER, batch, parts_for
from tests.support.models.tiny import settings


class Llm:
    """Remembers its calls, in order."""

    def __init__(self, **arguments: Any) -> None:
        self.calls: list[Any] = []
        self.version = "none"
        core = SimpleNamespace(shutdown=lambda: None)
        self.llm_engine = SimpleNamespace(set_weight_version=self.set_version, engine_core=core)
        self.llm_engine.reset_encoder_cache = lambda: self.calls.append("features")

    def set_version(self, version: str) -> None:
        self.version = version
        self.calls.append(f"version {version}")

    def collective_rpc(self, method: Any, args: tuple) -> None:
        self.calls.append("weights")

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def generate(self, prompts: list[dict], settings: list[Any], **more: Any) -> list[Any]:
        self.prompts, self.settings = prompts, settings
        token = {5: SimpleNamespace(logprob=-0.5)}
        span = SimpleNamespace(version=self.version)
        sample = SimpleNamespace(token_ids=[5], logprobs=[token], finish_reason="length", weight_versions=[span])
        samples = [[SimpleNamespace(index=i, **vars(sample)) for i in range(asked.n)] for asked in settings]
        return [SimpleNamespace(outputs=outputs) for outputs in samples]


@pytest.fixture
def engine(tmp_path, monkeypatch):
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=0))
    vllm = SimpleNamespace(
        LLM=Llm, SamplingParams=lambda **s: SimpleNamespace(**s), sampling_params=kinds, __version__="0"
    )
    monkeypatch.setattr(vllm_engine, "_load", lambda config, device: vllm)
    monkeypatch.setattr("hwgrpo.rollout.vllm.vllm_settings.resolve_model_path", lambda path: path)
    parts = replace(parts_for(None, tmp_path), config=settings("rollout.engine=vllm"))
    engine = VllmEngine(parts)
    yield engine
    engine.close()


def test_prompts_with_settings_of_their_own_are_sampled_in_one_call(engine):
    samplings = [Sampling(n=2, max_response_tokens=3, stop=("x",)), Sampling(n=1, max_response_tokens=1)]
    found = engine.generate_each(batch("ab", "c"), samplings)
    asked = [(each.n, each.max_tokens, each.stop) for each in engine._llm.settings]
    assert asked == [(2, 3, ["x"]), (1, 1, [])]
    assert found.prompt_index.tolist() == [0, 0, 1]


def test_what_older_weights_computed_is_forgotten_before_anything_is_sampled_with_new_ones(engine):
    engine._llm.calls.clear()
    engine.update_weights(3)
    assert engine._llm.calls == ["weights", "reset", "version 3"]


def test_an_engine_for_images_forgets_their_features_too(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engine.importlib.util, "find_spec", lambda name: name)
    reads = replace(engine._parts, image_sample=batch("a").prompts[0])
    other = VllmEngine(reads)
    other._llm.calls.clear()
    other.update_weights(3)
    assert other._llm.calls == ["weights", "reset", "features", "version 3"]
    monkeypatch.setattr(vllm_engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="reads images needs torchvision"):
        VllmEngine(reads)


def test_every_prompt_is_marked_with_the_version_of_the_weights(engine):
    for version in (3, 4):
        engine.update_weights(version)
        found = engine.generate(batch("ab", "c"), SAMPLING)
        assert found.weight_version == version
        assert {prompt["cache_salt"] for prompt in engine._llm.prompts} == {f"weights {version}"}
    assert [prompt["prompt_token_ids"] for prompt in engine._llm.prompts] == [
        TOKENIZER("ab").input_ids,
        TOKENIZER("c").input_ids,
    ]


def test_a_long_wait_for_vllm_is_reported_without_a_deadline(engine, monkeypatch, capfd):
    monkeypatch.setattr(deadlines, "REPORT_CHECK", 0.01)
    monkeypatch.setattr(deadlines, "LONG_WORK", 0.0)
    plain = engine._llm.generate
    monkeypatch.setattr(engine._llm, "generate", lambda *a, **k: (time.sleep(0.2), plain(*a, **k))[1])
    engine.generate(batch("ab", "c"), SAMPLING)
    assert "hwgrpo: waiting for the responses of 2 of 2 groups: " in capfd.readouterr().err
