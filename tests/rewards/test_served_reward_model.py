"""`served_reward_model` against replies of the shapes that vLLM's and SGLang's servers give.

Those of vLLM are checked against its CPU build in tests/vllm/test_reward_model.py; SGLang's are by its documentation.
"""

import pytest

from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.rewards.combine import RewardPipeline
from tests.support.models.reward_models import character_tokenizer
from tests.support.servers.reward_server import rewards_by

GROUPS = [["4", "four"], ["7"]]
MESSAGES = ({"role": "user", "content": "2+2?"},)
REPLIES = {
    "vllm_classify": lambda value: {
        "data": [{"index": 0, "label": "LABEL_0", "probs": [value, -1.0], "num_classes": 2}]
    },
    "vllm_pooling": lambda value: {"data": [{"index": 0, "object": "pooling", "data": [value, -1.0]}]},
    "vllm_score": lambda value: {"data": [{"index": 0, "object": "score", "score": value}]},
    "sglang_classify": lambda value: {"embedding": [value, -1.0], "meta_info": {"prompt_tokens": 3}},
}


@pytest.fixture
def scored(reward_config, make_batch):
    """Return a function: server, kwargs -> the rewards of `GROUPS`."""

    def score(server, api, messages=None, policies=None, **kwargs):
        kwargs = {"url": server.url, "api": api, "backoff": 0.01, **kwargs}
        with RewardPipeline(
            reward_config({"name": "served_reward_model", "kwargs": kwargs, **(policies or {})})
        ) as rewards:
            return rewards.score(*make_batch(GROUPS, messages=messages))

    return score


def size(asked):
    body = asked.body
    text = body.get("input", body.get("text", body.get("text_2", body.get("input_ids"))))
    return len(text) if text is not None else len(body["messages"][-1]["content"])


@pytest.mark.parametrize("api", REPLIES)
def test_plain_prompts_are_sent_as_text(scored, api):
    with rewards_by(lambda asked, n: REPLIES[api](size(asked) / 2)) as server:
        rewards = scored(server, api, model="rm")
    before = 0 if api == "vllm_score" else len("prompt 0")
    assert rewards.total.tolist() == [(before + n) / 2 for n in (1, 4, 1)]
    bodies = [asked.body for asked in sorted(server.asked, key=lambda asked: str(asked.body))]
    activation = {} if api == "sglang_classify" else {"use_activation": False}
    text = {
        "vllm_classify": {"input": "prompt 04"},
        "vllm_pooling": {"input": "prompt 04", "task": "classify"},
        "vllm_score": {"text_1": "prompt 0", "text_2": "4"},
        "sglang_classify": {"text": "prompt 04"},
    }[api]
    assert {"model": "rm", **activation, **text} in bodies
    paths = {
        "vllm_classify": "/classify",
        "vllm_pooling": "/pooling",
        "vllm_score": "/score",
        "sglang_classify": "/classify",
    }
    assert {asked.path for asked in server.asked} == {paths[api]}


@pytest.mark.parametrize("api", ["vllm_classify", "vllm_pooling"])
def test_conversations_are_sent_as_messages_to_vllm(scored, api):
    with rewards_by(lambda asked, n: REPLIES[api](size(asked))) as server:
        assert scored(server, api, MESSAGES).total.tolist() == [1.0, 4.0, 1.0]
    wanted = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]
    assert wanted in [asked.body["messages"] for asked in server.asked]


@pytest.mark.parametrize("api", ["vllm_classify", "sglang_classify"])
def test_with_a_tokenizer_its_template_is_applied_and_tokens_are_sent(scored, api, tmp_path):
    tokenizer = character_tokenizer(chat=True)
    tokenizer.save_pretrained(tmp_path)
    with rewards_by(lambda asked, n: REPLIES[api](1.0)) as server:
        scored(server, api, MESSAGES, tokenizer=str(tmp_path))
    wanted = tokenizer("[user]2+2?\n[assistant]four\n")["input_ids"]
    assert wanted in [asked.body["input" if api == "vllm_classify" else "input_ids"] for asked in server.asked]


def test_sglang_needs_a_tokenizer_for_conversations(scored):
    with rewards_by(lambda asked, n: {}) as server, pytest.raises(ConfigError, match=r"kwargs\.tokenizer"):
        scored(server, "sglang_classify", MESSAGES, policies={"on_error": "mask_sample"})
    assert server.asked == []


def test_another_label(scored):
    for api in ("vllm_classify", "vllm_pooling", "sglang_classify"):
        with rewards_by(lambda asked, n, api=api: REPLIES[api](5.0)) as server:
            assert scored(server, api, label=1).total.tolist() == [-1.0] * 3


@pytest.mark.parametrize(
    "reply",
    [{}, {"data": []}, {"data": [{"probs": []}]}, {"data": [{"probs": ["high"]}]}, [], None, {"data": 3}],
    ids=str,
)
def test_a_reply_without_a_score_is_a_failure(scored, reply):
    with (
        rewards_by(lambda asked, n: reply) as server,
        pytest.raises(RewardError, match=r"1 attempt, the last: .*score"),
    ):
        scored(server, "vllm_classify", retries=0)


@pytest.mark.parametrize("score", [10**400, -(10**400), float("inf"), float("nan")], ids=lambda each: str(each)[:4])
def test_a_score_that_no_float_can_be_is_not_finite(scored, score):
    with rewards_by(lambda asked, n: REPLIES["vllm_classify"](score)) as server:
        rewards = scored(server, "vllm_classify", policies={"on_nan": "mask_sample"})
    assert rewards.failures == {"nans/served_reward_model": 3}


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"api": "tgi"}, ["api='tgi'", "sglang_classify"]),
        ({"label": -1}, ["label=-1"]),
        ({"api": "vllm_score", "tokenizer": "x"}, ["tokenizer='x'", "no effect with api=vllm_score"]),
        ({"api": "sglang_classify", "activation": True}, ["activation=true", "no effect"]),
        ({"tokenizer": "/nowhere"}, ["tokenizer='/nowhere'", "no readable tokenizer"]),
        ({"chat_template": True}, ["chat_template=true", "needs a tokenizer"]),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(reward_config, change, expected):
    kwargs = {"url": "http://localhost:1", **change}
    with pytest.raises(ConfigError) as error:
        RewardPipeline(reward_config({"name": "served_reward_model", "kwargs": kwargs}))
    for words in ["reward.functions[0]", *expected]:
        assert words in str(error.value)
