"""The tool `search`: documents of a local table, ranked by BM25."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hwgrpo.data.agent_tasks import NOTHING_FOUND
from hwgrpo.data.row_schema import missing_column
from hwgrpo.data.sources import is_generated, open_rows
from hwgrpo.errors import ConfigError

K1, B = 1.2, 0.75
"""Saturation of a term's count, and share of the correction for a document's length: Lucene's defaults."""
_TERM = re.compile(r"\w+")


class Search:
    """Search over a table of documents.

    Args:
        documents: the table: whatever `data.train` takes, such as a JSON lines or Parquet file; a relative path starts
            at `folder`.
        text_column: column with the text of a document.
        title_column: column with a title, which is searched and shown, too; None: there is none.
        top_k: number of documents that a search returns.
        folder: the run's working directory.
        key: the tool's setting, for messages.

    Raises:
        ConfigError: an argument is wrong.
        DataError: there is no such table, or it has no such column, or no documents.
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
        source = str(documents)
        if not is_generated(source) and (Path(folder) / Path(source).expanduser()).exists():
            source = str(Path(folder) / Path(source).expanduser())
        rows = open_rows(source, "documents" if is_generated(source) else "train", f"{key}.kwargs.documents")
        columns = [text_column] if title_column is None else [title_column, text_column]
        for column in columns:
            if column not in rows.columns:
                raise missing_column(f"{key}.kwargs", column, rows.columns, source)
        self._documents = ["\n".join("" if row[each] is None else str(row[each]) for each in columns) for row in rows]
        self._top_k = top_k
        self._index = BM25(self._documents)

    def run(self, query: str) -> str:
        """Search a collection of documents, and return those that fit a query best.

        Args:
            query: What to search for: a few words that the documents contain.
        """
        best = self._index.best(query, self._top_k)
        if not best:
            return NOTHING_FOUND
        if len(best) == 1:
            return self._documents[best[0]]
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
