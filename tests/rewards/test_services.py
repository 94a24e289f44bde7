"""Rewards over HTTP: no sample is lost, each failure is counted under its policy, and nothing takes for ever."""

import _thread
import email.utils
import socket
import threading
import time

import pytest

from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.services.pacing import RateLimit, backoff, retry_after
from hwgrpo.support.text import hide_secrets
from tests.support.servers.reward_server import Drop, Half, Hang, Say, rewards_by

TEXTS = [["one", "three"], ["seventeen"], ["x", "xx"]]
LENGTHS = [3.0, 5.0, 9.0, 1.0, 2.0]
KEY = "the-key-that-only-the-test-knows"
QUICK = {"backoff": 0.01, "timeout": 20.0}


def lengths(asked, number):
    return {"rewards": [len(text) for text in asked.body["responses"]]}


@pytest.fixture
def scored(reward_config, make_batch):
    """Return a function: server or address, kwargs -> the rewards of `TEXTS` by `http`, one response a request."""

    def score(server, groups=TEXTS, policies=None, name="http", batch_arguments=None, **kwargs):
        url = server if isinstance(server, str | list) else server.url
        kwargs = {"batch_size": 1, **kwargs} if name == "http" else kwargs
        entry = {"name": name, "kwargs": {"url": url, **QUICK, **kwargs}, **(policies or {})}
        with RewardPipeline(reward_config(entry)) as rewards:
            return rewards.score(*make_batch(groups, **(batch_arguments or {})))

    return score


def test_a_batch_is_sent_with_prompts_truths_and_columns(scored):
    arguments = {
        "ground_truths": [3, ["a", "b"], None],
        "columns": [{"level": n, "bad": float("nan")} for n in range(3)],
    }
    with rewards_by(lengths) as server:
        rewards = scored(server, batch_size=None, batch_arguments=arguments)
        split = scored(server, batch_size=2, batch_arguments=arguments)
    assert rewards.total.tolist() == split.total.tolist() == LENGTHS
    whole, *parts = (asked.body for asked in server.asked)
    assert whole["prompts"] == ["prompt 0", "prompt 0", "prompt 1", "prompt 2", "prompt 2"]
    assert whole["responses"] == ["one", "three", "seventeen", "x", "xx"]
    assert whole["ground_truths"] == [3, 3, ["a", "b"], None, None]
    assert whole["columns"] == [{"level": n, "bad": "NaN"} for n in (0, 0, 1, 2, 2)]
    assert sorted(len(part["responses"]) for part in parts) == [1, 2, 2]


def test_conversations_are_sent_as_messages(scored):
    messages = ({"role": "user", "content": "hello"},)
    with rewards_by(lengths) as server:
        scored(server, [["a"]], batch_arguments={"messages": messages})
    assert server.asked[0].body["prompts"] == [[{"role": "user", "content": "hello"}]]


def test_openrlhfs_format(scored):
    def reply(asked, number):
        assert set(asked.body) == {"query", "prompts", "labels"}
        return {
            "rewards": [float(label) + len(query) for query, label in zip(asked.body["query"], asked.body["labels"])]
        }

    with rewards_by(reply) as server:
        rewards = scored(
            server, [["a", "bb"]], format="openrlhf", batch_size=None, batch_arguments={"ground_truths": [100]}
        )
    assert rewards.total.tolist() == [109.0, 110.0]
    assert server.asked[0].body["query"] == ["prompt 0a", "prompt 0bb"]


def test_replies_out_of_order_reach_their_samples(scored):
    arrived = threading.Barrier(5)

    def reply(asked, number):
        arrived.wait(30)
        time.sleep(0.02 * (5 - number))
        return lengths(asked, number)

    with rewards_by(reply) as server:
        assert scored(server).total.tolist() == LENGTHS
    assert server.most_in_flight == 5


def test_no_more_requests_are_in_flight_than_allowed(scored):
    with rewards_by(lambda asked, number: time.sleep(0.02) or lengths(asked, number)) as server:
        assert scored(server, max_concurrency=2).total.tolist() == LENGTHS
    assert server.most_in_flight == 2


FAULTS = {
    "status 500": Say({"detail": "no luck"}, 500),
    "too many requests": Say(status=429),
    "dropped connection": Drop,
    "half a reply": Half,
    "no JSON": Say(b"<html>"),
    "JSON of another kind": {"rewards": "many"},
    "too few rewards": {"rewards": []},
    "a text for a number": {"rewards": ["good"]},
    "a dict without score": {"rewards": [{"kind": "good"}]},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_is_retried(scored, fault):
    with rewards_by(lambda asked, n: FAULTS[fault] if n < 3 else lengths(asked, n)) as server:
        rewards = scored(server, max_concurrency=1, retries=3)
    assert rewards.total.tolist() == LENGTHS
    assert rewards.failures == {}
    assert len(server.asked) == 5 + 3


@pytest.mark.parametrize("policy", ["value", "mask_sample", "drop_group"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_is_a_failure_of_its_sample_under_the_policy(scored, fault, policy):
    def reply(asked, number):
        return FAULTS[fault] if asked.body["responses"] == ["three"] else lengths(asked, number)

    with rewards_by(reply) as server:
        policies = {"on_error": policy, **({"failure_value": -7.0} if policy == "value" else {})}
        rewards = scored(server, retries=2, policies=policies)
    assert rewards.failures == {"errors/http": 1}
    assert "no valid reply in 3 attempts" in rewards.first_failures["errors/http"]
    assert len(server.asked) == 4 + 3
    valid = {
        "value": [True] * 5,
        "mask_sample": [True, False, True, True, True],
        "drop_group": [False] * 2 + [True] * 3,
    }
    assert rewards.valid.tolist() == valid[policy]
    if policy == "value":
        assert rewards.total.tolist() == [3.0, -7.0, 9.0, 1.0, 2.0]
    else:
        assert rewards.total[rewards.valid].tolist() == [n for n, use in zip(LENGTHS, valid[policy]) if use]


def test_under_the_policy_raise_the_run_stops_with_the_reason(scored):
    reason = pytest.raises(RewardError, match=r"2 attempts.*HTTP 503.*out of memory.*on_error")
    with rewards_by(lambda asked, n: Say({"detail": "out of memory"}, 503)) as server, reason:
        scored(server, retries=1)


def test_what_no_retry_can_change_is_not_retried(scored):
    with rewards_by(lambda asked, n: Say({"detail": "unknown model"}, 404)) as server:
        rewards = scored(server, policies={"on_error": "mask_sample"})
    assert len(server.asked) == 5
    assert rewards.failures == {"errors/http": 5}


def test_a_server_that_is_gone_is_a_failure_of_each_sample(scored):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    rewards = scored(url, retries=1, policies={"on_error": "mask_sample"})
    assert rewards.failures == {"errors/http": 5}
    assert not rewards.valid.any()


def test_a_server_that_does_not_reply_takes_no_longer_than_its_timeouts(scored):
    def reply(asked, number):
        return Hang if asked.body["responses"] == ["x"] else lengths(asked, number)

    with rewards_by(reply) as server:
        rewards = scored(server, timeout=0.3, retries=1, policies={"on_error": "mask_sample"})
    assert rewards.valid.tolist() == [True, True, True, False, True]
    assert "no complete response within 0.3 s" in rewards.first_failures["errors/http"]
    assert len(server.asked) == 6


def test_a_batch_takes_no_longer_than_its_timeout(scored):
    def reply(asked, number):
        return Hang if asked.body["responses"] == ["x"] else lengths(asked, number)

    with rewards_by(reply) as server:
        start = time.monotonic()
        rewards = scored(server, timeout=300.0, batch_timeout=3.0, policies={"on_error": "mask_sample"})
        assert time.monotonic() - start < 60
    assert rewards.valid.tolist() == [True, True, True, False, True]
    assert "no valid reply within batch_timeout=3.0 s" in rewards.first_failures["errors/http"]


def test_a_server_that_asks_to_wait_is_given_the_time(scored):
    asked_at = {}

    def reply(asked, number):
        text = asked.body["responses"][0]
        first = text not in asked_at
        asked_at.setdefault(text, []).append(asked.time)
        return Say(status=429, headers={"Retry-After": "1"}) if first else lengths(asked, number)

    with rewards_by(reply) as server:
        assert scored(server).total.tolist() == LENGTHS
    assert all(second - first >= 1.0 for first, second in asked_at.values())


def test_a_server_that_asks_for_too_long_has_failed(scored):
    reason = pytest.raises(RewardError, match=r"HTTP 429.*asks to wait 3600 s, above max_wait=60")
    with rewards_by(lambda asked, n: Say(status=429, headers={"Retry-After": "3600"})) as server, reason:
        scored(server)
    assert len(server.asked) <= 5


def test_further_addresses_share_the_requests_and_step_in(scored):
    with rewards_by(lengths) as first, rewards_by(lengths) as second:
        assert scored([first.url, second.url]).total.tolist() == LENGTHS
        assert len(first.asked) == 3
        assert len(second.asked) == 2
    with rewards_by(lambda *_: Drop) as broken, rewards_by(lengths) as sound:
        assert scored([broken.url, sound.url]).total.tolist() == LENGTHS
        assert len(broken.asked) == 3


def test_null_nan_and_errors_of_single_responses(scored):
    def reply(asked, number):
        return {"rewards": [None, float("nan"), {"error": "no such unit"}, {"score": 2, "kind": "good"}, 1]}

    with rewards_by(reply) as server:
        policies = {"on_error": "mask_sample", "on_nan": "mask_sample"}
        rewards = scored(server, batch_size=None, policies=policies)
    assert rewards.valid.tolist() == [False, False, False, True, True]
    assert rewards.failures == {"nans/http": 2, "errors/http": 1}
    assert "no such unit" in rewards.first_failures["errors/http"]
    assert rewards.extras[3] == {"kind": "good"}


@pytest.mark.parametrize("requests", [1, 5])
def test_ctrl_c_ends_the_wait_for_a_server(scored, requests):
    """At any time: also while the threads are started."""
    begun = threading.Event()

    def reply(asked, number):
        if number + 1 == requests:
            begun.set()
        return Hang

    def interrupt():
        begun.wait(60)
        _thread.interrupt_main()

    with rewards_by(reply) as server:
        threading.Thread(target=interrupt, daemon=True).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            scored(server, timeout=300.0)
        assert time.monotonic() - start < 60
        until = time.monotonic() + 60
        while any(thread.name == "reward request" for thread in threading.enumerate()):
            assert time.monotonic() < until, "threads of broken-off requests go on"
            time.sleep(0.02)


def test_the_key_comes_from_the_environment_and_is_in_no_message(scored, monkeypatch):
    monkeypatch.setenv("REWARD_KEY", KEY)
    reason = pytest.raises(RewardError, match=r"HTTP 401.*environment variable REWARD_KEY")
    with rewards_by(lambda asked, n: Say({"you sent": asked.headers["authorization"]}, 401)) as server, reason as error:
        scored(server, api_key_variable="REWARD_KEY")
    assert server.asked[0].headers["authorization"] == f"Bearer {KEY}"
    assert KEY not in str(error.value)
    assert KEY not in hide_secrets(f"anything with {KEY}")


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"url": "example.com"}, ["url='example.com'", "http:// or https://"]),
        ({"url": "http://ada:pw-of-ada@host/"}, ["credentials", "api_key_variable"]),
        ({"url": []}, ["url=[]", "a list of addresses"]),
        ({"url": "http://host:port"}, ["url='http://host:port'"]),
        ({"timeout": 0}, ["timeout=0", "above 0"]),
        ({"retries": -1}, ["retries=-1", "at least 0"]),
        ({"retries": 1.5}, ["retries=1.5", "whole number"]),
        ({"max_concurrency": 0}, ["max_concurrency=0", "at least 1"]),
        ({"batch_timeout": -1}, ["batch_timeout=-1", "above 0"]),
        ({"api_key_variable": "NOT_SET_ANYWHERE"}, ["NOT_SET_ANYWHERE", "not set; export it"]),
        ({"api_key_variable": "sk-1234567890abcdef"}, ["must be the name of an environment variable"]),
        ({"api_key": "sk-1234567890abcdef"}, ["'api_key' is not known", "api_key_variable"]),
        ({"format": "verl"}, ["format='verl'", "openrlhf"]),
        ({"batch_size": 0}, ["batch_size=0", "at least 1"]),
        ({"retrys": 1}, ["'retrys'", "Did you mean 'retries'"]),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named_and_no_secret_shown(reward_config, change, expected):
    with pytest.raises(ConfigError) as error:
        RewardPipeline(reward_config({"name": "http", "kwargs": {"url": "http://localhost:1", **change}}))
    for words in expected:
        assert words in str(error.value)
    assert "1234567890abcdef" not in str(error.value)
    assert "pw-of-ada" not in str(error.value)


def test_the_address_is_needed_and_timeout_and_workers_are_not_for_services(reward_config):
    with pytest.raises(ConfigError, match=r"set reward\.functions\[0\]\.kwargs\.url"):
        RewardPipeline(reward_config({"name": "http"}))
    with pytest.raises(ConfigError, match=r"http has state.*timeout and workers"):
        RewardPipeline(reward_config({"name": "http", "kwargs": {"url": "http://localhost:1"}, "timeout": 3.0}))


def test_waits_double_up_to_the_longest_and_are_the_same_each_time():
    waits = [backoff(attempt, 0.5, 10.0, b"request") for attempt in range(8)]
    assert waits == [backoff(attempt, 0.5, 10.0, b"request") for attempt in range(8)]
    for attempt, wait in enumerate(waits):
        full = min(10.0, 0.5 * 2**attempt)
        assert full / 2 <= wait <= full
    assert len({backoff(0, 0.5, 10.0, b"%d" % n) for n in range(10)}) == 10


def test_what_retry_after_says():
    assert retry_after({"retry-after": " 2.5 "}) == 2.5
    date = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert 90 < retry_after({"retry-after": date}) <= 100
    for nothing in ({}, {"retry-after": "soon"}, {"retry-after": "-3"}, {"retry-after": "nan"}, {"retry-after": "inf"}):
        assert retry_after(nothing) == 0.0


def test_requests_are_spread_over_a_minute():
    rate = RateLimit(30.0)
    assert [rate.reserve(100.0) for _ in range(3)] == [0.0, 2.0, 4.0]
    assert rate.reserve(200.0) == 0.0
    assert [RateLimit(None).reserve(100.0) for _ in range(3)] == [0.0] * 3
