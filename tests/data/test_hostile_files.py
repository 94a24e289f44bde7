"""200 data files, folders and names that were made to break a reader: each is read, or refused in our own words."""

import gzip
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from hwgrpo.data import expansion
from hwgrpo.data.convert import convert
from hwgrpo.data.dataset_files import open_copy
from hwgrpo.data.formats import read_file
from hwgrpo.data.inspection import Settings, inspect_files
from hwgrpo.data.own_files import open_files, own_conversion
from hwgrpo.data.prompts import build_dataset
from hwgrpo.data.published import PUBLISHED
from hwgrpo.data.sources import open_rows
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.models.loading import resolve_model_path

ROW = b'{"prompt": "sort 12=", "answer": "12"}\n'
LONGEST_MESSAGE = 1200
CPU_SECONDS = 30
"""Far above what any of them needs: it is to catch what grows with the square of a size."""
SMALL_LIMIT = 1 << 17
"""Stands for the limit of expanded bytes, so that the files can be small."""


def compressed(draw: random.Random, folder: Path) -> Path:
    """Write a .jsonl.gz file that expands to much, is broken, or is compressed twice."""
    many = gzip.compress(ROW * draw.choice((10, 8000)))
    raw = draw.choice(
        (
            lambda: many,
            lambda: gzip.compress(b'{"prompt": "' + b"a" * (1 << 20) + b'"}\n'),
            lambda: gzip.compress(b" " * (1 << 20)),
            lambda: gzip.compress(b"\n" * (1 << 20)),
            lambda: gzip.compress(gzip.compress(b"a" * (1 << 20))),
            lambda: many * 3,
            lambda: many + b"\x00" * draw.randrange(1, 99),
            lambda: many + b"garbage",
            lambda: many[: draw.randrange(len(many))],
            lambda: many[:20] + bytes([draw.randrange(256)]) + many[21:],
        )
    )()
    return written(folder / "x.jsonl.gz", raw)


def table(draw: random.Random, folder: Path) -> Path:
    """Write a .parquet file with repeated names, countless rows, or types that are no text."""
    text, path = pyarrow.array(["a", "b"]), folder / "x.parquet"
    twice = pyarrow.StructArray.from_arrays([text, text], names=["role", "role"])
    columns = draw.choice(
        (
            lambda: {"prompt": pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 300, "int32"), ["a" * 50])},
            lambda: {"prompt": pyarrow.array(["b" * 4000] * 60).dictionary_encode()},
            lambda: {"prompt": pyarrow.nulls(3)},
            lambda: {"prompt": pyarrow.array([[1], [2]])},
            lambda: {"prompt": pyarrow.array([[[]], [[[]]]])},
            lambda: {"prompt": twice},
            lambda: {"prompt": pyarrow.ListArray.from_arrays([0, 1, 2], twice)},
            lambda: {"prompt": text, **{f"c{number}": text for number in range(draw.choice((10, 100)))}},
            lambda: {"prompt": text, "x" * 100_000: text},
            lambda: {"answer": text},
            dict,
            lambda: {"prompt": text.slice(0, 0)},
        )
    )()
    content = pyarrow.table(columns)
    if draw.random() < 0.3 and columns:
        name = content.column_names[0]
        content = content.append_column(draw.choice((name, "")), content.column(0)).append_column("", content.column(0))
    pyarrow.parquet.write_table(content, path, compression=draw.choice(("none", "snappy", "zstd")))
    if draw.random() < 0.3:
        raw = bytearray(path.read_bytes())
        for _ in range(draw.randrange(1, 4)):
            raw[-draw.randrange(1, min(200, len(raw)))] = draw.randrange(256)
        path.write_bytes(raw)
    return path


def separated(draw: random.Random, folder: Path) -> Path:
    """Write a .csv or .tsv file with very many columns, open quotes, or bytes that are no text."""
    path = folder / draw.choice(("x.csv", "x.tsv"))
    by = "\t" if path.suffix == ".tsv" else ","
    names = by.join(f"c{number}" for number in range(5000))
    text = draw.choice(
        (
            f"prompt{by}{names}\n" + f"a{by}{by * 4999}\n" * 2,
            f"prompt{by}{names}{by}c7\n",
            f"prompt{by}prompt\na{by}b\n",
            f'prompt{by}answer\n"a{by}b\n' * 50,
            f"prompt{by}answer\n{by * 100_000}\n",
            "prompt\n" + "\r" * 1000 + "a\n",
            "prompt\n" + '"' * 9999 + "\n",
            "prompt\na\x00b\n",
            "\ufeff\ufeffprompt\na\n",
            "prompt\n" + "a" * 200_000 + "\n",
            "\n" * 1000,
        )
    )
    return written(path, text.encode())


def objects(draw: random.Random, folder: Path) -> Path:
    """Write JSON that is nested, huge, named twice, or of other kinds than a reader expects."""
    deep = draw.choice((500, 5000, 100_000))
    value = draw.choice(
        (
            "[" * deep + "]" * deep,
            '{"a":' * deep + "1" + "}" * deep,
            "9" * 5000,
            "1e999",
            "-NaN",
            '"\\ud800"',
            '"' + "\\u0000" * 99 + '"',
            '{"prompt": {"prompt": []}}',
            '[{"role": "user", "content": ' + "[" * 300 + "]" * 300 + "}]",
            '[{"role": "user", "content": [{"type": "text", "text": "a", "image": {"url": "x"}}]}]',
            '[{"role": {}, "content": []}]',
            "[" + '{"role": "user", "content": "a"},' * 2000 + '{"role": "user", "content": "b"}]',
            "[]",
            '"a"',
            "null",
        )
    )
    fields = draw.choice((f'"prompt": {value}', f'"prompt": "a", "x": {value}', f'"prompt": 1, "prompt": {value}'))
    row = "{" + fields + "}"
    name, text = draw.choice(
        (
            ("x.jsonl", f"{row}\n" * 2),
            ("x.jsonl", row + row),
            ("x.jsonl", f"\ufeff{row}\n\ufeff{row}"),
            ("x.json", f"[{row}]"),
            ("x.json", f'{{"data": [{row}], "data": [{row}]}}'),
            ("x.json", f'{{"data": {row}}}'),
            ("x.json", f"{row}\n{row}"),
            ("x.json", '{"data": null}'),
            ("x.jsonl", '{"prompt": "a", ' + ", ".join(f'"k{n}": {n}' for n in range(5000)) + "}"),
            ("x.jsonl", '{"prompt": "a", "' + "k" * 300_000 + '": 1}'),
        )
    )
    return written(folder / name, text.encode("utf-8", "surrogatepass"))


def named(draw: random.Random, folder: Path) -> str:
    """Return a name that no file has, that the system refuses, or of something that is no plain file."""
    link = folder / "x.jsonl"
    return draw.choice(
        (
            lambda: "x" * 5000,
            lambda: "x" * 5000 + ".jsonl",
            lambda: "a/" * 3000 + "x.jsonl",
            lambda: "a" * 250 + "/" + "b" * 250,
            lambda: "../" * 1500 + "x.jsonl",
            lambda: "x\x00.jsonl",
            lambda: "\udcff.jsonl",
            lambda: "x\x1b[2J\n.jsonl",
            lambda: "~nobody-here/x.jsonl",
            lambda: "~" + "x" * 3000,
            lambda: "/proc/self/mem",
            lambda: linked(link, "/proc/self/mem"),
            lambda: linked(link, "/dev/zero"),
            lambda: linked(link, "/dev/tty"),
            lambda: linked(link, link.name),
            lambda: linked(link, "gone"),
            lambda: linked(link, str(folder)),
            lambda: (os.mkfifo(link), str(link))[1],
            lambda: linked(folder / "x.parquet", "/proc/self/maps"),
            lambda: str(written(folder / "x.bin", ROW)),
        )
    )()


def trees(draw: random.Random, folder: Path) -> Path:
    """Make a folder of data files with links, many levels, several formats, or a damaged dataset."""
    top = folder / "top"
    top.mkdir()
    kind = draw.randrange(8)
    if kind == 0:
        os.symlink("..", top / "up")
        os.symlink("/dev/zero", top / "zero.jsonl")
    elif kind == 1:
        inner = top
        for _ in range(300):
            inner = inner / "d"
        os.makedirs(inner)
        written(inner / "x.jsonl", ROW)
    elif kind == 2:
        (top / "x.jsonl").mkdir()
        written(top / "x.jsonl" / "y.jsonl", ROW)
    elif kind == 3:
        written(top / "train.jsonl", ROW)
        written(top / "train.csv", b"prompt\na\n")
    elif kind == 4:
        written(top / "train.jsonl", ROW)
        os.symlink("/proc/self/mem", top / "train-2.jsonl")
    else:
        datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(str(top))
        hostile = draw.choice((b"", b"[]", b"{}", b"null", b'{"_data_files": [{"filename": "../../../etc/passwd"}]}'))
        victim = draw.choice([file for file in sorted(top.iterdir()) if file.is_file()])
        victim.write_bytes(hostile if draw.random() < 0.6 else victim.read_bytes()[: draw.randrange(40)])
    return top


def written(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def linked(path: Path, to: str) -> str:
    os.symlink(to, path)
    return str(path)


KINDS: tuple[Callable[[random.Random, Path], Path | str], ...] = (compressed, table, separated, objects, named, trees)
COUNTS = {compressed: 30, table: 40, separated: 30, objects: 50, named: 30, trees: 20}


@pytest.fixture
def small_limit(monkeypatch):
    monkeypatch.setattr(expansion, "SMALLEST", SMALL_LIMIT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets, "load_dataset", offline)


def offline(*_: object, **__: object) -> None:
    raise ConnectionError("there is no network")


def test_there_are_two_hundred():
    assert sum(COUNTS.values()) == 200
    assert set(COUNTS) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_hostile_files_are_read_or_refused_by_every_reader(kind, tmp_path, tokenizer, data_config, small_limit):
    refused = 0
    for seed in range(COUNTS[kind]):
        folder = tmp_path / str(seed)
        folder.mkdir()
        name = str(kind(random.Random(f"{kind.__name__} {seed}"), folder))
        config = data_config(name, chat="never", max_prompt_tokens=1_000_000)
        own = own_conversion("x", "prompt", "", None, "x")
        readers = (
            lambda name=name, config=config: build_dataset(config, tokenizer, "train"),
            lambda name=name, config=config: inspect_files([name], Settings(config, None, tokenizer, 1)),
            lambda name=name, own=own: convert(own, open_files([name]), None, False),
            lambda name=name: open_copy(PUBLISHED["gsm8k"], name),
        )
        for number, read in enumerate(readers):
            started = time.process_time()
            try:
                read()
            except (DataError, ConfigError) as error:
                refused += 1
                said = str(error).replace(str(folder), "")
                assert said.isprintable(), (seed, number, ascii(said))
                assert len(said) < LONGEST_MESSAGE, (seed, number, said[:LONGEST_MESSAGE])
            except Exception as error:
                raise AssertionError(f"{kind.__name__} {seed}, reader {number}, {name[-60:]!r}") from error
            assert time.process_time() - started < CPU_SECONDS, (seed, number)
    assert refused > 0, "some are beyond reading"


def test_a_compressed_file_is_read_up_to_its_limit_and_no_byte_further(tmp_path, small_limit):
    inside, beyond = SMALL_LIMIT // len(ROW), SMALL_LIMIT // len(ROW) + 1
    assert len(read_file(written(tmp_path / "x.jsonl.gz", gzip.compress(ROW * inside))).rows) == inside
    with pytest.raises(DataError, match=r"expand to more than 131,072 \(100 times their size.*gunzip"):
        read_file(written(tmp_path / "y.jsonl.gz", gzip.compress(ROW * beyond)))
    noise = random.Random(0)
    rows = [json.dumps({"prompt": noise.randbytes(900).hex()}).encode() + b"\n" for _ in range(2000)]
    assert len(read_file(written(tmp_path / "z.jsonl.gz", gzip.compress(b"".join(rows)))).rows) == 2000


def test_a_bomb_is_refused_before_it_is_expanded(tmp_path, monkeypatch):
    read = []
    plain = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda file, size: read.append(got := plain(file, size)) or got)
    monkeypatch.setattr(expansion, "SMALLEST", SMALL_LIMIT)
    bomb = written(tmp_path / "x.jsonl.gz", gzip.compress(b" " * (16 << 20)))
    with pytest.raises(DataError, match="times their size"):
        read_file(bomb)
    assert sum(map(len, read)) <= expansion.allowed_size(bomb) + (1 << 16)


def test_rows_of_less_than_a_byte_are_counted_as_they_are_read(tmp_path, small_limit):
    path = tmp_path / "x.parquet"
    words = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100_000, "int32"), ["b" * 100])
    pyarrow.parquet.write_table(pyarrow.table({"prompt": words.cast("string")}), path)
    assert path.stat().st_size < 5000
    with pytest.raises(DataError, match="times their size"):
        read_file(path)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": words.cast("string").slice(0, 1000)}), path)
    assert len(read_file(path).rows) == 1000


def test_two_columns_of_one_name_are_refused_in_tables_of_every_kind(tmp_path):
    path = tmp_path / "x.parquet"
    one, two = pyarrow.array(["a"]), pyarrow.array(["b"])
    pyarrow.parquet.write_table(pyarrow.table([one, two], names=["prompt", "prompt"]), path)
    for file in (path, written(tmp_path / "x.csv", b"prompt,prompt\na,b\n")):
        with pytest.raises(DataError, match="two columns have the name 'prompt'; rename one"):
            read_file(file)


@pytest.mark.parametrize("key", ["model.path", "model.tokenizer"])
@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-here/x", "x\x00"])
def test_the_name_of_a_model_that_the_system_refuses_is_a_mistake_of_the_settings(name, key):
    with pytest.raises(ConfigError, match=key):
        resolve_model_path(name, key)


def test_a_folder_that_cannot_be_walked_is_named_with_the_remedy(tmp_path, monkeypatch):
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "inner")

    monkeypatch.setattr(Path, "glob", denied)
    readers = (
        lambda: open_rows(str(tmp_path), "train", "data.train"),
        lambda: inspect_files([str(tmp_path)], Settings(None, None, None, 0)),
        lambda: open_copy(PUBLISHED["gsm8k"], str(tmp_path)),
    )
    for read in readers:
        with pytest.raises(DataError, match=r"cannot be read \(.*Permission denied.*name its files instead"):
            read()
