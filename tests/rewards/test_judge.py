"""`judge`: its prompt, the score in its reply, the cache, and the cost."""

import json

import pytest

from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.services.concurrent_requests import InvalidReply
from hwgrpo.rewards.services.judge_replies import ScoreReader, last_object
from tests.support.servers.reward_server import Say, rewards_by

GROUPS = [["good", "bad"], ["good"]]
MESSAGES = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"})


def said(text, prompt_tokens=10, completion_tokens=3):
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}


def grade(asked, number):
    return said("Score: 8" if "good" in asked.body["messages"][-1]["content"] else "I think\nscore: 2.5")


@pytest.fixture
def scored(reward_config, make_batch):
    """Return a function: server, kwargs -> the rewards of `GROUPS`."""

    def score(server, groups=GROUPS, policies=None, batch=None, **kwargs):
        kwargs = {"url": server.url, "model": "grader", "backoff": 0.01, **kwargs}
        entry = {"name": "judge", "kwargs": kwargs, **(policies or {})}
        with RewardPipeline(reward_config(entry)) as rewards:
            return rewards.score(*make_batch(groups, **(batch or {})))

    return score


def test_a_response_gets_the_score_in_the_reply_and_the_cost_is_counted(scored):
    with rewards_by(grade) as server:
        rewards = scored(server, prompt_price=2.0, completion_price=10.0)
    assert rewards.total.tolist() == [8.0, 2.5, 8.0]
    asked = server.asked[0]
    assert asked.path == "/chat/completions"
    assert {name: asked.body[name] for name in ("model", "temperature", "max_tokens")} == {
        "model": "grader",
        "temperature": 0.0,
        "max_tokens": 512,
    }
    assert rewards.extras[1] == {
        "judge_prompt_tokens": 10,
        "judge_completion_tokens": 3,
        "judge_cost": pytest.approx(50e-6),
        "judge_reply": "I think\nscore: 2.5",
    }


def test_equal_requests_are_sent_and_paid_for_once(scored):
    with rewards_by(grade) as server:
        rewards = scored(server, [["good", "good", "bad"]])
    assert rewards.total.tolist() == [8.0, 8.0, 2.5]
    assert len(server.asked) == 2
    assert [extra["judge_prompt_tokens"] for extra in rewards.extras] == [10, 0, 10]


def test_a_template_has_prompt_response_truth_and_columns(scored, tmp_path):
    template = "{{Q}}: {prompt} R: {response} T: {ground_truth} L: {level}"
    batch = {"ground_truths": [["4", "four"]], "columns": [{"level": 3}], "messages": MESSAGES}
    file = tmp_path / "template.txt"
    file.write_text(template)
    with rewards_by(grade) as server:
        scored(server, [["{good}"]], batch=batch, template=template, system="Level {level}")
        scored(server, [["{good}"]], batch=batch, template_file=str(file))
        scored(server, [["good"]], batch={"messages": MESSAGES[1:]}, template="{prompt} {response}")
    first, second, third = (asked.body["messages"] for asked in server.asked)
    question = '{Q}: system: be brief\n\nuser: 2+2? R: {good} T: ["4", "four"] L: 3'
    assert first == [{"role": "system", "content": "Level 3"}, {"role": "user", "content": question}]
    assert second == first[1:]
    assert third == [{"role": "user", "content": "2+2? good"}]


def test_a_template_with_a_column_that_is_not_there_stops_the_run_whatever_the_policy(scored):
    with rewards_by(grade) as server, pytest.raises(ConfigError, match=r"\{level\}.*no such column.*has: .*prompt"):
        scored(server, template="{response} {level}", policies={"on_error": "mask_sample"})


@pytest.mark.parametrize("template", ["{response}", "{response} {ground_truth}"])
def test_a_row_whose_ground_truth_cannot_be_shown_fails_alone(template, scored):
    policies = {"on_error": "mask_sample"}
    batch = {"ground_truths": [None, [{"criterion": "short"}]]}
    with rewards_by(grade) as server:
        rewards = scored(server, policies=policies, batch=batch, template=template)
    wanted = "ground_truth" not in template
    assert rewards.valid.tolist() == [wanted, wanted, True]
    assert rewards.total.tolist()[2] == 8.0
    if not wanted:
        assert rewards.failures == {"errors/judge": 2}
        assert "no ground truth" in rewards.first_failures["errors/judge"]
        assert server.asked[0].body["messages"][0]["content"] == 'good [{"criterion": "short"}]'


@pytest.mark.parametrize("reply", ["no idea", "score: eleven", "score: 11", "score: -1"])
def test_a_reply_without_a_valid_score_is_asked_for_again_and_then_a_failure(scored, reply):
    def answer(asked, number):
        return said(reply) if "bad" in asked.body["messages"][0]["content"] else grade(asked, number)

    with rewards_by(answer) as server:
        rewards = scored(
            server, [["good", "bad"]], retries=2, score_range=[0, 10], policies={"on_error": "mask_sample"}
        )
    assert rewards.valid.tolist() == [True, False]
    assert rewards.failures == {"errors/judge": 1}
    assert "no valid reply in 3 attempts" in rewards.first_failures["errors/judge"]
    assert len(server.asked) == 4


def test_tokens_of_invalid_replies_are_paid_for_too(scored):
    with rewards_by(lambda asked, n: said("hm", 5, 7) if n == 0 else grade(asked, n)) as server:
        rewards = scored(server, [["good"]])
    assert rewards.extras[0]["judge_prompt_tokens"] == 15
    assert rewards.extras[0]["judge_completion_tokens"] == 10
    assert len(server.asked) == 2


@pytest.mark.parametrize("count", [10**400, 10**12, -5, True, 2.5, "10", None, [1]], ids=lambda each: str(each)[:8])
def test_what_is_no_number_of_tokens_costs_nothing_and_ends_no_run(scored, reward_config, make_batch, count):
    with rewards_by(lambda asked, n: said("score: 8", count, 4)) as server:
        rewards = scored(server, [["good"]], prompt_price=2.0, completion_price=10.0)
        prices = {"prompt_price": 2.0, "completion_price": 10.0}
        seen = counted(server, reward_config, make_batch([["good"]]), **prices)
    assert rewards.total.tolist() == [8.0]
    assert rewards.extras[0]["judge_prompt_tokens"] == 0
    assert rewards.extras[0]["judge_cost"] == pytest.approx(40e-6)
    assert [(each["prompt_tokens"], each["completion_tokens"]) for each in seen] == [(0.0, 4.0)] * 2
    assert seen[0]["cost"] == pytest.approx(40e-6)


@pytest.mark.parametrize("score", ["1" + "0" * 400, "-1" + "0" * 400, "1e999", "NaN"], ids=lambda each: each[:5])
def test_a_score_that_no_float_can_be_is_an_invalid_reply(scored, score):
    with (
        rewards_by(lambda asked, n: said(f'{{"score": {score}}}')) as server,
        pytest.raises(RewardError, match=r"no valid reply in 2 attempts.*is not finite"),
    ):
        scored(server, [["good"]], retries=1, json_field="score")


@pytest.mark.parametrize(
    "reply", [{}, {"choices": []}, {"choices": [{"message": {"content": None}}]}, [], "text", None]
)
def test_a_reply_that_is_no_chat_completion_is_a_failure(scored, reply):
    with rewards_by(lambda asked, n: Say(reply)) as server, pytest.raises(RewardError, match="no valid reply"):
        scored(server, [["good"]], retries=0)


def counted(server, reward_config, batch, **kwargs):
    """Return what the judge counts for each of two scorings of a batch."""
    entry = {"name": "judge", "kwargs": {"url": server.url, "model": "grader", "backoff": 0.01, **kwargs}}
    with RewardPipeline(reward_config({**entry, "on_error": "mask_sample"})) as rewards:
        seen = []
        for _ in range(2):
            rewards.score(*batch)
            seen.append(rewards.metrics.read()["judge"]["counts"])
    return seen


def test_requests_tokens_and_cost_of_all_replies_are_counted(reward_config, make_batch):
    def answer(asked, number):
        return said("hm", 5, 7) if "bad" in asked.body["messages"][0]["content"] else grade(asked, number)

    prices = {"prompt_price": 2.0, "completion_price": 10.0}
    with rewards_by(answer) as server:
        batch = make_batch([["good", "good", "bad"]])
        seen = counted(server, reward_config, batch, retries=1, **prices)
    tokens = {"prompt_tokens": 20.0, "completion_tokens": 17.0}  # a valid reply, and two of a response without a score
    expected = {"requests": 2.0, "cache_hits": 0.0, **tokens, "cost": pytest.approx(210e-6)}
    assert seen == [expected, expected]


def test_replies_from_the_cache_are_counted_as_such_and_cost_nothing(reward_config, make_batch, tmp_path):
    with rewards_by(grade) as server:
        first, second = counted(server, reward_config, make_batch(GROUPS), cache=str(tmp_path / "cache"))
    assert (first["requests"], first["cache_hits"], first["prompt_tokens"]) == (3.0, 0.0, 30.0)
    assert second == {"requests": 0.0, "cache_hits": 3.0, "prompt_tokens": 0.0, "completion_tokens": 0.0}


def test_replies_are_read_from_the_cache_by_later_runs(scored, tmp_path):
    folder = str(tmp_path / "cache")
    with rewards_by(grade) as server:
        first = scored(server, cache=folder)
        again = scored(server, cache=folder)
        assert len(server.asked) == 3
        other_response = scored(server, [["bad good"]], cache=folder)
        other_model = scored(server, [["good"]], cache=folder, model="another")
        other_sampling = scored(server, [["good"]], cache=folder, temperature=1.0)
        other_body = scored(server, [["good"]], cache=folder, body={"seed": 1})
        assert len(server.asked) == 7
    assert first.total.tolist() == again.total.tolist() == [8.0, 2.5, 8.0]
    assert {extra["judge_prompt_tokens"] for extra in again.extras} == {0}
    for each in (other_response, other_model, other_sampling, other_body):
        assert each.extras[0]["judge_prompt_tokens"] == 10
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_damaged_or_invalid_file_of_the_cache_is_replaced(scored, tmp_path):
    with rewards_by(grade) as server:
        scored(server, [["good"]], cache=str(tmp_path))
        [file] = tmp_path.rglob("*.json")
        whole = file.read_text()
        for damaged in (whole[: len(whole) // 2], "[]", json.dumps({"text": "no score"})):
            file.write_text(damaged)
            assert scored(server, [["good"]], cache=str(tmp_path)).total.tolist() == [8.0]
            assert file.read_text() == whole
    assert len(server.asked) == 4


def test_a_failed_reply_is_not_stored(scored, tmp_path):
    with rewards_by(lambda asked, n: said("no idea")) as server:
        scored(server, [["good"]], cache=str(tmp_path), retries=0, policies={"on_error": "mask_sample"})
    assert list(tmp_path.rglob("*.json")) == []


def test_the_requests_of_all_ranks_share_the_limit_per_minute(scored, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with rewards_by(grade) as server:
        scored(server, requests_per_minute=4 * 120.0)
    times = sorted(asked.time for asked in server.asked)
    assert times[-1] - times[0] > 0.8  # the third is sent 2 / 120 min = 1 s after the first


READ = [
    ({}, "score: 7", 7.0),
    ({}, "Score : **-7.25** of 10", -7.25),
    ({}, "not a score: 3 but\nSCORE: 4", 4.0),
    ({"pattern": r"\[\[(\d+)\]\]"}, "[[3]] or [[5]]", 5.0),
    ({"json_field": "grade"}, '{"grade": 3}', 3.0),
    ({"json_field": "grade"}, 'First {x}, {"grade": 1}. Then\n```json\n{"why": {"grade": 9}, "grade": 2.5}\n```', 2.5),
]
UNREAD = [
    ({}, "7", "no score in the reply '7'"),
    ({"pattern": "score (.*)"}, "score high", "'high' in the reply is no number"),
    ({"json_field": "grade"}, "grade: 3", "no JSON object with 'grade'"),
    ({"json_field": "grade"}, '{"grade": "3"}', "no number but '3'"),
    ({"json_field": "grade"}, '{"grade": true}', "no number but True"),
    ({"json_field": "grade"}, '{"grade": NaN}', "not finite"),
    ({"json_field": "grade", "score_range": [0, 1]}, '{"grade": 1.5}', r"1.5 is outside of score_range \[0, 1\]"),
]


def reader(pattern=None, json_field=None, score_range=None):
    return ScoreReader(Kwargs("reward.functions[0]"), pattern, json_field, score_range)


@pytest.mark.parametrize("settings, reply, score", READ)
def test_the_score_in_a_reply(settings, reply, score):
    assert reader(**settings).score(reply) == score


@pytest.mark.parametrize("settings, reply, reason", UNREAD)
def test_a_reply_without_a_score_says_what_it_has(settings, reply, reason):
    with pytest.raises(InvalidReply, match=reason):
        reader(**settings).score(reply)


@pytest.mark.parametrize("text", ["{" * 3000, '{"a": ' * 3000, "{" + "[" * 100_000])
def test_deep_and_broken_json_has_no_object(text):
    assert last_object(text) is None


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"model": ""}, ["model=''", "must be a text"]),
        ({"template": "{prompt}"}, ["template='{prompt}'", "has no {response}"]),
        ({"template": "{response.text}"}, ["{response.text}", "just names"]),
        ({"template": "{response!r}"}, ["{response!r}", "just names"]),
        ({"template": "{response:>9}"}, ["{response:>9}", "just names"]),
        ({"template": "{response} {"}, ["is no template", "{{ and }}"]),
        ({"template": "{response}", "template_file": "x"}, ["exclude each other"]),
        ({"template_file": "/nowhere.txt"}, ["template_file='/nowhere.txt'", "cannot be read"]),
        ({"pattern": "score"}, ["pattern='score'", "a group"]),
        ({"pattern": "("}, ["no regular expression"]),
        ({"pattern": "(.)", "json_field": "x"}, ["exclude each other"]),
        ({"score_range": [1, 0]}, ["score_range=[1, 0]", "[lowest, highest]"]),
        ({"score_range": 5}, ["score_range=5"]),
        ({"max_tokens": 0}, ["max_tokens=0", "at least 1"]),
        ({"temperature": -1}, ["temperature=-1"]),
        ({"requests_per_minute": 0}, ["requests_per_minute=0", "above 0"]),
        ({"body": {"stream": True}}, ["'stream'", "remove it"]),
        ({"cache": "/proc/nowhere"}, ["cache='/proc/nowhere'", "cannot be written"]),
        ({"modell": "x"}, ["'modell'", "Did you mean 'model'"]),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(reward_config, change, expected):
    kwargs = {"url": "http://localhost:1", "model": "grader", **change}
    with pytest.raises(ConfigError) as error:
        RewardPipeline(reward_config({"name": "judge", "kwargs": kwargs}))
    for words in ["reward.functions[0]", *expected]:
        assert words in str(error.value)
