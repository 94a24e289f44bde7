"""The tool `search`: documents of a local table, ranked by BM25."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hwgrpo.errors import ConfigError, DataError, nearest

K1, B = 1.2, 0.75
"""Saturation of a term's count, and share of the correction for a document's length: Lucene's defaults."""
_TERM = re.compile(r"\w+")


class Search:
    """Search over a table of documents.

    Args:
        documents: path of the table, JSON lines or Parquet; a relative one starts at `folder`.
        text_column: column with the text of a document.
        title_column: column with a title, which is searched and shown, too; None: there is none.
        top_k: number of documents that a search returns.
        folder: the run's working directory.
        key: the tool's setting, for messages.

    Raises:
        ConfigError: an argument is wrong, or there is no such file.
        DataError: the table has no such column, or no documents.
    """

    def __init__(
        self,
        documents: str,
        text_column: str = "text",
        title_column: str | None = None,
        top_k: int = 3,
        *,
        folder: str = ".",
        key: str = "tool search",
    ) -> None:
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise ConfigError(f"{key}.kwargs.top_k={top_k!r} must be a whole number of at least 1")
        path = Path(folder) / Path(str(documents)).expanduser()
        if not path.is_file():
            raise ConfigError(f"{key}.kwargs.documents={str(documents)!r}: no file {path}")
        columns = [text_column] if title_column is None else [title_column, text_column]
        self._documents = ["\n".join(each) for each in zip(*_read_columns(path, columns), strict=True)]
        if not self._documents:
            raise DataError(f"{path} has no documents, which the tool search needs")
        self._top_k = top_k
        self._index = BM25(self._documents)

    def run(self, query: str) -> str:
        """Search a collection of documents, and return those that fit a query best.

        Args:
            query: What to search for: a few words that the documents contain.
        """
        best = self._index.best(query, self._top_k)
        if not best:
            return "No document has any of these words."
        return "\n\n".join(f"[{rank}] {self._documents[number]}" for rank, number in enumerate(best, start=1))

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class BM25:
    """An index of documents. Terms are runs of letters and digits, in lower case.

    Scores are those of Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), with
    Lucene's idf, which is never negative. Equal scores are ranked by the documents' order.

    Args:
        documents: their texts.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        postings: dict[str, tuple[list[int], list[int]]] = {}
        lengths = np.zeros(len(documents))
        for number, text in enumerate(documents):
            terms = terms_of(text)
            lengths[number] = len(terms)
            for term, count in Counter(terms).items():
                numbers, counts = postings.setdefault(term, ([], []))
                numbers.append(number)
                counts.append(count)
        self._count = len(documents)
        self._norm_D = K1 * (1 - B + B * lengths / max(1.0, lengths.mean()))
        self._postings = {
            term: (np.array(numbers, np.int32), np.array(counts, np.float32))
            for term, (numbers, counts) in postings.items()
        }

    def scores(self, query: str) -> np.ndarray:
        """Return the scores of all documents, [D] fp64."""
        scores_D = np.zeros(self._count)
        for term, times in sorted(Counter(terms_of(query)).items()):  # sums in one order are reproducible
            numbers, counts = self._postings.get(term, ((), ()))
            if len(numbers):
                idf = np.log1p((self._count - len(numbers) + 0.5) / (len(numbers) + 0.5))
                scores_D[numbers] += times * idf * counts * (K1 + 1) / (counts + self._norm_D[numbers])
        return scores_D

    def best(self, query: str, top_k: int) -> list[int]:
        """Return the numbers of the documents with the highest scores above 0, best first."""
        scores_D = self.scores(query)
        order = np.argsort(-scores_D, kind="stable")[:top_k]
        return [int(number) for number in order if scores_D[number] > 0]


def terms_of(text: str) -> list[str]:
    """Return the terms of a text, in order."""
    return _TERM.findall(text.lower())


def _read_columns(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """Return the columns of a table as texts, "" for null."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        names = parquet.read_schema(path).names
        _require(path, columns, names)
        table = parquet.read_table(path, columns=list(columns)).to_pydict()
        return [["" if each is None else str(each) for each in table[column]] for column in columns]
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: not a JSON object")
            _require(path, columns, row, f", line {number}")
            rows.append(["" if row[column] is None else str(row[column]) for column in columns])
    return [list(each) for each in zip(*rows, strict=True)] or [[] for _ in columns]


def _require(path: Path, columns: Sequence[str], names: Sequence[str] | dict[str, object], place: str = "") -> None:
    for column in columns:
        if column not in names:
            near = nearest(column, names)
            hint = f" Did you mean {near!r}?" if near else ""
            raise DataError(f"{path}{place}: no column {column!r}; it has: {', '.join(names)}.{hint}")
