"""metrics.jsonl: one line of metrics per step, in full precision."""

from collections.abc import Mapping
from pathlib import Path

from hwgrpo.support.jsonlines import StepLines, read_lines

FILE = "metrics.jsonl"


class JsonlLogger:
    """Appends `{"step": ..., "<metric>": ...}` to `run_dir/metrics.jsonl`.

    Floats are written so that reading them back gives the same bits. Several lines may belong to one step (training
    and validation); `read_metrics` merges them.
    """

    def __init__(self, run_dir: Path) -> None:
        self._lines = StepLines(run_dir / FILE)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        assert "step" not in values, "a line's step is not a metric"
        self._lines.append({"step": step, **values})

    def cut_back(self, step: int) -> None:
        """Remove the lines of every later step."""
        self._lines.cut_back(step)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return step -> metrics of a run, the lines of one step merged; empty when nothing was logged.

    Raises:
        DataError: the file has a line that this logger did not write.
    """
    metrics: dict[int, dict[str, float]] = {}
    for record in read_lines(run_dir / FILE):
        step = record.pop("step")
        metrics.setdefault(step, {}).update({name: float(value) for name, value in record.items()})
    return metrics
