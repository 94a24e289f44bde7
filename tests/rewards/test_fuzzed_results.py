"""Whatever a reward returns is a number, a failure that the policy covers, or an error in the project's own words."""

import decimal
import fractions
import json
import math
import numbers
import random

import numpy
import pytest
import torch

from hwgrpo.errors import RewardError
from hwgrpo.observe.completions import sample_record
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.processes.messages import encode_reply, pack_all, pack_one, unpack_all, unpack_one
from hwgrpo.rewards.signatures import make_reward_function
from hwgrpo.support.jsonlines import jsonable

LONGEST_MESSAGE = 1000
"""Characters of a message."""


class Odd:
    """An object of which everything raises."""

    def __repr__(self):
        raise OSError("no repr")

    __str__ = __float__ = __len__ = __iter__ = __eq__ = __hash__ = __repr__


class OddReal(numbers.Real):
    """A number that is none."""

    def __float__(self):
        raise OSError("no float")

    __repr__ = Odd.__repr__


for name in OddReal.__abstractmethods__:
    setattr(OddReal, name, Odd.__repr__)
OddReal.__abstractmethods__ = frozenset()


class OddItem:
    """An array of one number that cannot be got at."""

    ndim = 0

    def item(self):
        raise OSError("no item")


class OddError(Exception):
    """An exception that says nothing."""

    __str__ = Odd.__repr__


VALUES = (
    *(0, 1, True, -2.5, 10**400, -(10**400), 10**5000, float("nan"), float("inf"), -0.0, 1e308, None),
    *(decimal.Decimal("1.5"), decimal.Decimal("sNaN"), decimal.Decimal("1e999999"), fractions.Fraction(1, 3)),
    *(fractions.Fraction(10**400, 3), complex(1, 2), "1", "", "\ud800\x1b[2J" * 900, b"\xff", Odd(), OddReal()),
    *(numpy.float32(0.5), numpy.int64(3), numpy.bool_(True), numpy.str_("x"), numpy.array(2.0), numpy.array([2.0])),
    *(numpy.datetime64("2020-01-01"), numpy.complex64(1), numpy.longdouble("1e4000"), numpy.float16("nan")),
    *(torch.tensor(1.5), torch.tensor([1.5]), torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(1j)),
    *(torch.tensor(1.0, device="meta"), torch.tensor(2.0, requires_grad=True), torch.ones(2, 2), OddItem()),
    *([], [1], (), {}, {1}, object(), int, lambda: 1, range(3), iter([1])),
)
FIELDS = ("score", "x", 3, None, (1, 2), "\ud800", "\x1b" * 500)


def one(draw):
    """Draw what a call for one response may return or raise."""
    kind = draw.random()
    if kind < 0.7:
        return draw.choice(VALUES)
    if kind < 0.9:
        fields = {draw.choice(FIELDS): draw.choice((*VALUES, *circles())) for _ in range(draw.randrange(4))}
        return fields | ({"score": draw.choice(VALUES)} if draw.random() < 0.7 else {})
    return draw.choice((OddError(), SystemExit(0), RecursionError("x" * 5000), KeyError("\x1b\ud800"), GeneratorExit()))


def circles():
    """Return things that hold themselves, or are very deep."""
    circle, deep = [], []
    circle.append(circle)
    for _ in range(5000):
        deep = [deep]
    return circle, deep


def listed(draw, size):
    """Draw what a call for all responses may return."""
    values = [draw.choice(VALUES) for _ in range(draw.choice((size, size, size, size + 1, 0)))]
    floats = [float(number) for number in range(size)]
    ways = (lambda: values, lambda: tuple(values), lambda: floats, lambda: numpy.array(floats))
    others = (lambda: torch.tensor(floats), lambda: set(floats), lambda: iter(values), lambda: one(draw))
    return draw.choice(ways + others)()


def try_case(seed, make_batch, reward_config):
    """Score a batch with a reward that returns odd things; return what became of it."""
    draw = random.Random(seed)
    batch = make_batch([["a", "b"], ["c"]])
    size = len(batch[1])
    remote = draw.random() < 0.5

    def each(solution_str):
        result = one(draw)
        if isinstance(result, BaseException):
            raise result
        return sent(pack_one, unpack_one, result) if remote else result

    def together(completions):
        result = listed(draw, size)
        if isinstance(result, BaseException):
            raise result
        return sent(pack_all, unpack_all, result) if remote else result

    function = draw.choice((each, together))
    policy = draw.choice(("raise", "value", "mask_sample", "drop_group"))
    settings = {"name": "exact_match", "on_error": policy, "on_nan": policy}
    rewards = RewardPipeline(reward_config(settings))
    rewards.functions = (make_reward_function("f", function, {}, {}, "reward"),)
    try:
        scored = rewards.score(*batch)
    except RewardError as error:
        return str(error)
    assert all(map(math.isfinite, scored.total.tolist()))
    for sample in range(size):
        record = sample_record(sample, *batch, scored)
        json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
    return " ".join(scored.first_failures.values())


def sent(pack, unpack, result):
    """Send a result as a process of the function would, which reports what it cannot send as an error of the call."""
    return unpack(json.loads(encode_reply({"value": pack(result)}))["value"])


@pytest.mark.parametrize("start", range(0, 600, 200))
def test_odd_results_are_numbers_failures_or_errors(start, make_batch, reward_config):
    for seed in range(start, start + 200):
        said = try_case(seed, make_batch, reward_config)
        assert said.isprintable(), (seed, ascii(said))
        assert len(said) < LONGEST_MESSAGE, (seed, said)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("decimal.Decimal('1.5')", 1.5),
        ("fractions.Fraction(1, 4)", 0.25),
        ("numpy.float32(0.5)", 0.5),
        ("torch.tensor(2.5, dtype=torch.bfloat16)", 2.5),
        ("10**400", None),
        ("-10**5000", None),
        ("decimal.Decimal('1e9999')", None),
    ],
)
@pytest.mark.parametrize("where", ["here", "process"])
def test_numbers_of_every_kind_count_and_those_too_large_are_like_nan(where, value, number, make_batch, pipeline):
    source = f"import decimal, fractions\nimport numpy, torch\ndef f(solution_str): return {value}"
    if where == "process":
        scored = unpack_one(json.loads(encode_reply({"value": pack_one(eval(value))}))["value"])
        assert scored == number if number is not None else math.isinf(scored)
        return
    scored = pipeline(source, on_nan="mask_sample").score(*make_batch([["a"]]))
    assert scored.total.tolist() == [number or 0]
    assert scored.failures == ({} if number is not None else {"nans/f": 1})
