"""Responses of servers that are wrong in random ways: each is used as what it says, or an error names it.

REPLIES in the environment says how many are tried of each kind of server.
"""

import copy
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hwgrpo.catalog import ENGINES
from hwgrpo.errors import RunError
from hwgrpo.rollout.server.engine import ServerEngine
from hwgrpo.values import Sampling
from tests.rollout.served import batch, parts_for
from tests.rollout.server.fake_sglang import FakeSglang
from tests.support.servers.fake_server import TOKEN, FakeServer

COUNT = int(os.environ.get("REPLIES", "150"))
MOST = 3
SAMPLING = Sampling(n=2, max_response_tokens=MOST)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 10**30, 10**400, -(10**400), 0.5, -0.25, 1e308, -1e308, 1e-5),
    *(float("nan"), float("inf"), -float("inf"), "", "stop", "length", "5", "-0.5", "\u0000", "x" * 1000),
    *([], {}, [[]], [None], [-0.5], [5], {"a": 1}, {"type": "stop"}, {"token_logprobs": [-0.5]}),
)
KINDS = {"vllm_server": FakeServer, "sglang_server": FakeSglang}


def changed(value: Any, draw: random.Random) -> Any:
    """Return a copy of JSON in which something is replaced, missing, repeated or moved."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def collect(at: Any) -> None:
        keys = at if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        for key in list(keys):
            places.append((at, key))
            collect(at[key])

    collect(value)
    if not places or draw.random() < 0.03:
        return draw.choice(ODD)
    at, key = draw.choice(places)
    way = draw.randrange(5)
    if way == 0:
        del at[key]
    elif way == 1 and isinstance(at, list):
        at.insert(key, copy.deepcopy(at[key]))
    elif way == 2:
        other, other_key = draw.choice(places)
        at[key] = copy.deepcopy(other[other_key])
    else:
        at[key] = draw.choice(ODD)
    return value


def spoilt(draw: random.Random, reply: Any) -> bytes:
    """Return a good response with some things wrong, as the bytes of its body."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        reply = changed(reply, draw)
    text = json.dumps(reply).encode()
    way = draw.random()
    if way < 0.05:
        return text[: draw.randrange(len(text) + 1)]
    if way < 0.1:
        place = draw.randrange(len(text) + 1)
        return text[:place] + draw.randbytes(3) + text[place:]
    if way < 0.13:
        return text.replace(b"-0.5", draw.choice((b"-1e400", b"-" + b"9" * 5000, b"[" * 50_000, b"-0.50e0")))
    return text


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(kind: str) -> Iterator[FakeServer]:
    server = KINDS[kind]()
    yield server
    server.close()


@pytest.fixture(scope="module")
def engine(kind: str, server: FakeServer, tmp_path_factory) -> Iterator[ServerEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THE_TOKEN", TOKEN)
        words = (f"rollout.engine={kind}", "rollout.server.retries=0")
        engine = ENGINES.load(kind).make(parts_for(server.url, tmp_path_factory.mktemp(kind), *words))
    yield engine
    engine.close()


def test_a_wrong_reply_is_used_for_what_it_says_or_named_and_never_ends_in_a_traceback(engine, server):
    vocabulary = engine._parts.model.config.vocab_size
    used, errors = 0, []
    for seed in range(COUNT):
        draw = random.Random(seed)
        server.faults = [lambda reply, draw=draw: spoilt(draw, reply)]
        try:
            found = engine.generate(batch("ab"), SAMPLING)
        except RunError as error:
            errors.append(str(error))
            continue
        used += 1
        assert len(found.offsets) == 3, seed
        assert found.offsets.diff().ge(1).all(), seed
        assert found.offsets.diff().le(MOST).all(), seed
        assert found.tokens.ge(0).all(), seed
        assert found.tokens.lt(vocabulary).all(), seed
        assert torch.isfinite(found.logprobs).all(), seed
        assert found.logprobs.le(1e-3).all(), seed
    assert all("failed 1 times in a row" in error or "belongs to another run" in error for error in errors)
    assert COUNT / 50 < used < COUNT * 4 / 5, "most changes matter, and some do not"


USABLE = (-1e38, -(10**30), 0, 0.0009)
UNUSABLE = (-(10**400), 10**400, -1e39, float("nan"), float("-inf"), float("inf"), 0.01, True, "-1", None)


def test_a_logprob_is_a_number_of_float32_and_not_above_0(kind: str, engine, server):
    for logprob in (*USABLE, *UNUSABLE):

        def change(reply: Any, logprob: Any = logprob) -> Any:
            if kind == "vllm_server":
                reply["choices"][0]["logprobs"]["token_logprobs"][0] = logprob
            else:
                reply[0]["meta_info"]["output_token_logprobs"][0][0] = logprob
            return reply

        server.faults = [change]
        if logprob in USABLE:
            assert torch.isfinite(engine.generate(batch("ab"), SAMPLING).logprobs).all()
        else:
            with pytest.raises(RunError, match="log-prob"):
                engine.generate(batch("ab"), SAMPLING)
