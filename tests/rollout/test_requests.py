"""Answers of other engines become completions that end and read as the local engine's."""

import dataclasses

import pytest
import torch

from hwgrpo.errors import ConfigError
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.requests import Sample, make_completions, make_requests
from hwgrpo.rollout.server.weights_folder import WeightsFolder
from hwgrpo.rollout.vllm import engine
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.worker import read_weights
from hwgrpo.values import Prompt, PromptBatch, Sampling
from tests.support.models.tiny import settings

TOKENIZER = character_tokenizer("")
EOS = int(TOKENIZER.eos_token_id or 0)


def answer(text: str, *more: int, stopped: bool = False) -> Sample:
    tokens = [*TOKENIZER(text).input_ids, *more]
    return Sample(tokens, [-1.0 - i for i in range(len(tokens))], stopped)


def one(found: Sample, **settings):
    sampling = Sampling(n=1, max_response_tokens=20, **settings)
    return make_completions([[found]], [sampling], TOKENIZER, (EOS,), 3)


def test_a_stop_token_stays_among_the_tokens_and_out_of_the_text():
    found = one(answer("ab", EOS, stopped=True))
    assert found.tokens.tolist()[-1] == EOS
    assert found.texts == ("ab",)
    assert found.finished.tolist() == [True]


def test_a_response_that_was_cut_is_not_finished():
    assert one(answer("abc")).finished.tolist() == [False]


def test_a_text_is_cut_before_its_stop_string_and_its_tokens_behind_it():
    found = one(answer("abXYcd", stopped=True), stop=("XY",))
    assert found.texts == ("ab",)
    assert found.tokens.tolist() == TOKENIZER("abXY").input_ids
    assert found.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert found.finished.tolist() == [True]


def test_one_answer_stands_for_all_samples_of_a_greedy_prompt():
    sampling = Sampling(n=3, max_response_tokens=4, greedy=True)
    found = make_completions([[answer("a")], [answer("bc")]], [sampling] * 2, TOKENIZER, (EOS,), 1)
    assert found.texts == ("a", "a", "a", "bc", "bc", "bc")
    assert found.prompt_index.tolist() == [0, 0, 0, 1, 1, 1]


def test_seeds_depend_on_run_and_prompt_and_leave_room_for_samples():
    def seeds(seed: int, *uids: str) -> list[int]:
        prompts = [Prompt(uid=uid, text="", token_ids=(1,), ground_truth=None, columns={}) for uid in uids]
        sampling = Sampling(n=8, max_response_tokens=1, seed=seed)
        return [r.seed for r in make_requests(PromptBatch(tuple(prompts)), [sampling] * len(prompts))]

    many = seeds(1, *map(str, range(2000)))
    assert len(set(many)) == 2000
    assert max(many) < 2**62
    assert seeds(1, "7") == [many[7]]
    assert seeds(2, "7") != [many[7]]


def test_a_weights_folder_is_written_in_files_and_in_the_dtype_of_sampling(tmp_path, monkeypatch):
    monkeypatch.setattr("hwgrpo.rollout.server.weights_folder.FILE_BYTES", 100)
    folder = WeightsFolder(tmp_path / "w", torch.bfloat16, "run", "start")
    weights = {f"w{i}": torch.randn(30) for i in range(3)} | {"count": torch.tensor([5])}
    written = folder.write(2, iter(weights.items()))
    assert len(list(written.iterdir())) == 2
    found = dict(read_weights(str(written)))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name].to(torch.bfloat16)) for name in ("w0", "w1", "w2"))
    assert found["count"].dtype == torch.int64


def test_weights_that_reuse_one_buffer_are_copied(tmp_path):
    def pairs():
        buffer = torch.zeros(4)
        for i in range(3):
            yield f"w{i}", buffer.fill_(i)

    written = WeightsFolder(tmp_path, torch.float32, "run", "start").write(0, pairs())
    assert {name: tensor[0].item() for name, tensor in read_weights(str(written))} == {"w0": 0, "w1": 1, "w2": 2}


@pytest.mark.parametrize(
    "found, told",
    [([], "vLLM is not installed"), ([("vllm", "0.23.0")], r"has vllm 0\.23\.0, and >=0\.32,<0\.34 is needed")],
)
def test_a_missing_or_wrong_vllm_is_told_with_its_remedy(monkeypatch, found, told):
    monkeypatch.setattr(engine, "_installed", lambda: iter(found))
    with pytest.raises(ConfigError, match=told) as error:
        engine._load(settings("rollout.engine=vllm"), torch.device("cpu"))
    assert "pip install" in str(error.value)
    assert "rollout.engine='vllm'" in str(error.value)


@pytest.mark.parametrize(
    "words, told",
    [
        (["rollout.kv_cache_gb=1"], r"rollout\.kv_cache_gb=1.* has no effect with rollout\.engine='local'"),
        (["rollout.engine_kwargs={a: 1}"], r"rollout\.engine_kwargs=.* has no effect"),
        (["rollout.server.port=80"], r"rollout\.server\.port=80 has no effect with rollout\.engine='local'"),
        (["rollout.engine=vllm", "rollout.graphs=true"], r"rollout\.graphs=true has no effect"),
        (
            ["rollout.engine=vllm", "rollout.tensor_parallel_size=2", "rollout.group_timeout=1"],
            "use rollout.engine=vllm_server",
        ),
        (["rollout.engine=vllm", "rollout.max_model_len=31"], r"rollout\.max_model_len=31 is smaller .* at least 32"),
        (["rollout.engine=vllm_server", "rollout.server.url=here:1"], r"must begin with http://"),
        (
            ["rollout.engine=vllm_server", "rollout.server.url=http://h:1", "rollout.server.python=p"],
            r"rollout\.server\.python='p' has no effect with rollout\.server\.url",
        ),
    ],
)
def test_settings_that_would_do_nothing_or_cannot_work_are_refused(words, told):
    with pytest.raises(ConfigError, match=told):
        settings(*words)


def test_settings_of_vllm_are_accepted_with_it():
    config = settings("rollout.engine=vllm_server", "rollout.server.port=8000", "rollout.tensor_parallel_size=2")
    assert dataclasses.asdict(config.rollout.server)["port"] == 8000
