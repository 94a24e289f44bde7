"""BM25 of the tool `search`: scores by the formula, ranks that can be repeated, tables of either form."""

import asyncio
import json
import math

import pyarrow
import pyarrow.parquet
import pytest

from hwgrpo.agents.search_tool import BM25, K1, B
from hwgrpo.agents.tools import load_tools
from hwgrpo.config.schema import ToolConfig
from hwgrpo.data.agent_tasks import NOTHING_FOUND
from hwgrpo.errors import ConfigError, DataError

TEXTS = ["The cat sat. The cat slept.", "A dog sat, by a cat and a dog and a horse", "Das Pferd schläft", "", "cat"]
TITLES = ["Cats", None, "Pferde", "Nothing", "Cat"]


def search(tmp_path, query, **kwargs):
    """Return the result of a search over the file that `kwargs` name."""
    (tool,) = load_tools([ToolConfig(name="search", kwargs=kwargs)], folder=str(tmp_path))
    try:
        return asyncio.run(tool.call({"query": query}))
    finally:
        tool.close()


@pytest.fixture
def rows(tmp_path):
    rows = [{"text": text, "title": title} for text, title in zip(TEXTS, TITLES, strict=True)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "title": TITLES}), tmp_path / "a.parquet")
    return rows


def test_scores_are_those_of_the_formula():
    documents = [text.lower().replace(".", "").replace(",", "").split() for text in TEXTS]
    mean = sum(map(len, documents)) / len(documents)
    scores = BM25(TEXTS).scores("Cat sat cat")
    for terms, score in zip(documents, scores, strict=True):
        expected = 0.0
        for term in ("cat", "sat", "cat"):
            n = sum(term in each for each in documents)
            idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
            tf = terms.count(term)
            expected += idf * tf * (K1 + 1) / (tf + K1 * (1 - B + B * len(terms) / mean))
        assert score == pytest.approx(expected, rel=1e-6)  # counts are fp32


@pytest.mark.parametrize("file", ["a.jsonl", "a.parquet"])
def test_the_best_documents_are_returned_best_first(tmp_path, rows, file):
    result = search(tmp_path, "CAT?", documents=file, top_k=2)
    assert result.text == f"[1] {TEXTS[4]}\n\n[2] {TEXTS[0]}"
    assert search(tmp_path, "schläft", documents=str(tmp_path / file)).text == TEXTS[2]  # one alone has no number
    titled = search(tmp_path, "pferde nothing", documents=file, title_column="title")
    assert titled.text == "[1] Nothing\n\n\n[2] Pferde\nDas Pferd schläft"
    assert search(tmp_path, "zebra", documents=file).text == NOTHING_FOUND
    assert search(tmp_path, "...", documents=file).failure == ""


def test_equal_scores_are_in_the_order_of_the_documents():
    assert BM25(["a b", "b a", "c", "a b"]).best("a", 3) == [0, 1, 3]


WRONG = [
    ({"documents": "b.jsonl"}, (ConfigError, DataError), r"tools\.0\.kwargs\.documents='b.jsonl'"),
    ({"documents": "a.jsonl", "top_k": 0}, ConfigError, r"tools\.0\.kwargs\.top_k=0 must be a whole number"),
    ({"documents": "a.jsonl", "text_column": "txt"}, DataError, r"no column 'txt'.*Did you mean 'text'"),
    ({"documents": "a.parquet", "text_column": "txt"}, DataError, r"no column 'txt'.*Did you mean 'text'"),
    ({"documents": "broken.jsonl"}, DataError, r"broken.jsonl, line 2"),
    ({"documents": "list.jsonl"}, DataError, r"list.jsonl, line 1"),
    ({"documents": "empty.jsonl"}, DataError, "empty.jsonl"),
    ({}, ConfigError, r"search needs documents; set rollout\.agent\.tools\.0\.kwargs\.documents"),
]


@pytest.mark.parametrize(("kwargs", "error", "reason"), WRONG)
def test_what_is_wrong_with_a_table_is_said(tmp_path, rows, kwargs, error, reason):
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text":\n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(error, match=reason):
        search(tmp_path, "a", **kwargs)
