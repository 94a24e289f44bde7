"""Data files with odd values, or damaged in odd ways, are read or refused in the project's own words."""

import csv
import datetime
import decimal
import json
import random
import uuid

import pyarrow
import pyarrow.parquet
import pytest

from hwgrpo.data.formats import READERS
from hwgrpo.data.inspection import Settings, inspect_files
from hwgrpo.data.prompts import build_dataset
from hwgrpo.errors import ConfigError, DataError

LONGEST_MESSAGE = 1000
"""Characters of a message, the path of the file aside."""
NAMES = ("prompt", "answer", "ground_truth", "reward_model", "data_source", "extra_info", "x", "", "\x1b[31m", "\ud800")
TEXTS = ("12", "a b", "", " \n", "\ud800", "\udfff x", "\x00", "\x1b[2J", "\u202e", "\ufeff", "a" * 3000, "{", '"', ",")
SCALARS = (None, True, False, 0, -1, 1 << 70, 10**400, 1.5, float("nan"), float("inf"), -0.0)
MESSAGES = (
    [{"role": "user", "content": "hi"}],
    [{"role": "user", "content": "\ud800"}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "user", "content": [{"type": {"a": 1}}]}],
    [{"role": "user", "content": [{"type": "image", "x" * 500: "\x1b"}]}],
    [{"role": "\x1b" * 900, "content": "hi"}],
    [{"role": "user", "content": None, "tool_calls": [1]}],
    [{"role": "assistant", "content": "hi"}, {"role": "tool", "content": "x"}],
    [{"role": 3, "content": "hi"}, 5],
    [{}],
    [[]],
)
TYPES = (
    (pyarrow.decimal128(20, 3), decimal.Decimal("1.250")),
    (pyarrow.binary(), b"\xff\x00ab"),
    (pyarrow.large_binary(), b"12"),
    (pyarrow.timestamp("ns", tz="UTC"), 1_700_000_000_123_456_789),
    (pyarrow.timestamp("us"), -(1 << 62)),
    (pyarrow.date32(), 1 << 30),
    (pyarrow.date64(), datetime.date(2020, 1, 1)),
    (pyarrow.time64("ns"), 86_399_999_999_999),
    (pyarrow.duration("ns"), 1 << 62),
    (pyarrow.map_(pyarrow.string(), pyarrow.int64()), [("a", 1)]),
    (pyarrow.map_(pyarrow.int64(), pyarrow.string()), [(3, "a"), (3, "b")]),
    (pyarrow.list_(pyarrow.list_(pyarrow.int8())), [[1], None, []]),
    (pyarrow.large_list(pyarrow.string()), ["a", None]),
    (pyarrow.list_(pyarrow.float32(), 2), [1.0, 2.0]),
    (pyarrow.struct({"ground_truth": pyarrow.string()}), {"ground_truth": "7"}),
    (pyarrow.struct({"a": pyarrow.struct({"b": pyarrow.binary()})}), {"a": {"b": b"\x80"}}),
    (pyarrow.float16(), 1.5),
    (pyarrow.uint64(), (1 << 64) - 1),
    (pyarrow.large_string(), "hello"),
    (pyarrow.string_view(), "hello"),
    (pyarrow.null(), None),
    (pyarrow.bool_(), True),
    (pyarrow.uuid(), uuid.UUID(int=5).bytes),
)


def value(draw, depth=0):
    """Draw something that JSON can hold, or nearly."""
    kind = draw.randrange(9 if depth < 3 else 7)
    if kind < 3:
        return draw.choice(TEXTS)
    if kind < 5:
        return draw.choice(SCALARS)
    if kind < 7:
        return draw.choice(MESSAGES)
    if kind == 7:
        return [value(draw, depth + 1) for _ in range(draw.randrange(3))]
    return {draw.choice(NAMES): value(draw, depth + 1) for _ in range(draw.randrange(4))}


def row(draw):
    """Draw a row, mostly one with a prompt that can be read."""
    fields = {"prompt": value(draw) if draw.random() < 0.5 else "sort 12=", "answer": "12"}
    return fields | {draw.choice(NAMES): value(draw) for _ in range(draw.randrange(3))}


def encode_reply(fields):
    """Write a row in JSON; integers as long as they like, some of them nested deeply or named twice."""
    return json.dumps(fields).replace(str(10**400), "9" * 5000)


def lines(draw):
    """Return a .jsonl file."""
    written = [encode_reply(row(draw)) for _ in range(draw.randrange(1, 4))]
    if draw.random() < 0.2:
        deep = draw.choice((300, 3_000, 100_000))
        written.append(
            draw.choice(('{"prompt": ' + "[" * deep, '{"prompt": "a", "x": ' + "[" * deep + "]" * deep + "}"))
        )
    return "\n".join(written).encode()


def document(draw):
    """Return a .json file."""
    listed = b"[" + b",".join(line for line in lines(draw).split(b"\n") if line) + b"]"
    return draw.choice((listed, listed, b'{"data": ' + listed + b"}", encode_reply(value(draw)).encode()))


def comma_separated(draw, path, delimiter=","):
    """Write a .csv file."""
    with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, quoting=draw.choice((csv.QUOTE_ALL, csv.QUOTE_MINIMAL)))
        writer.writerow(["prompt", "answer", *draw.sample(NAMES, draw.randrange(3))][draw.randrange(2) :])
        for _ in range(draw.randrange(4)):
            writer.writerow([draw.choice(TEXTS) for _ in range(draw.randrange(1, 5))])
    return path.read_bytes()


def parquet(draw, path):
    """Write a .parquet file."""
    count = draw.randrange(1, 4)
    columns = {"prompt": pyarrow.array(["sort 12="] * count), "answer": pyarrow.array(["12"] * count)}
    for name in draw.sample([name for name in NAMES if name != "\ud800"], draw.randrange(1, 4)):
        kind, each = draw.choice(TYPES)
        columns[name] = pyarrow.array([each] + [draw.choice((each, None)) for _ in range(count - 1)], kind)
        if kind in (pyarrow.large_string(), pyarrow.binary(), pyarrow.bool_()) and draw.random() < 0.5:
            columns[name] = columns[name].dictionary_encode()
    if draw.random() < 0.3:  # text that is none
        columns["answer"] = pyarrow.StringArray.from_buffers(
            1, pyarrow.py_buffer(b"\x00\x00\x00\x00\x02\x00\x00\x00"), pyarrow.py_buffer(b"\xff\xfe")
        ).take(pyarrow.array([0] * count))
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path.read_bytes()


def damaged(draw, raw):
    """Return the bytes of a file, most often changed."""
    at = draw.randrange(len(raw) + 1)
    ways = (
        *[lambda: raw] * 16,
        lambda: raw[:at],
        lambda: b"",
        lambda: b"\xef\xbb\xbf" + raw,
        lambda: raw.decode("utf-8", "replace").encode("utf-16"),
        lambda: raw.decode("utf-8", "replace").encode("utf-16-be"),
        lambda: raw[:at] + bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9))) + raw[at:],
        lambda: raw[:at] + bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9))) + raw[at + 4 :],
        lambda: raw.replace(b"\n", b"\r"),
        lambda: raw[:at] + b"\x00" + raw[at:],
    )
    return draw.choice(ways)()


def try_case(seed, folder, tokenizer, data_config):
    """Read one file as training and as `data inspect` do; return whether it was read."""
    draw = random.Random(seed)
    suffix = draw.choice(list(READERS))
    path = folder / f"{seed}{suffix}"
    makers = {".jsonl": lines, ".json": document}
    if suffix in makers:
        raw = makers[suffix](draw)
    elif suffix == ".parquet":
        raw = parquet(draw, path)
    else:
        raw = comma_separated(draw, path, "\t" if suffix == ".tsv" else ",")
    path.write_bytes(damaged(draw, raw))
    config = data_config(path, chat=draw.choice(("auto", "always", "never")), max_prompt_tokens=100)

    def train():
        dataset = build_dataset(config, tokenizer, "train")
        assert all(dataset.prompt(index, 0).token_ids for index in range(len(dataset)))

    refusals = [refusal(train), refusal(lambda: inspect_files([str(path)], Settings(config, None, tokenizer, 0)))]
    path.unlink()
    for said in filter(None, refusals):
        assert path.name in said
        assert said.isprintable(), ascii(said)
        assert len(said.replace(str(path), "")) < LONGEST_MESSAGE, said
    return refusals.count(None)


def refusal(read):
    """Return what a refused file is refused with, or None."""
    try:
        read()
    except (DataError, ConfigError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("start", range(0, 300, 100))
def test_odd_and_damaged_files_are_read_or_refused(start, tmp_path, tokenizer, data_config):
    read = sum(try_case(seed, tmp_path, tokenizer, data_config) for seed in range(start, start + 100))
    assert 40 < read < 160  # neither is all refused nor all read
