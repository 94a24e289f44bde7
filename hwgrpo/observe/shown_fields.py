"""Metrics shown in panel and tables: their names and formats."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MISSING = "-"


def decimals(digits: int) -> Callable[[float], str]:
    """Return a formatter with so many decimals, which writes a number too small for them as 3e-05, not as 0."""

    def show(value: float) -> str:
        return f"{value:.0e}" if 0 < abs(value) < 0.5 * 10**-digits else f"{value:,.{digits}f}"

    return show


def percent(value: float) -> str:
    """Write a share of one: 0.25 -> 25%."""
    return f"{100 * value:.0f}%"


def seconds(value: float) -> str:
    """Write a short time: 0.042 -> 42 ms, 3.21 -> 3.2 s, 134 -> 2:14."""
    if value < 0.9995:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 99.95 else duration(value)


def duration(value: float | None) -> str:
    """Write a time in seconds as m:ss, h:mm:ss or 2d 3:04:05; "-" when it is not known."""
    if value is None or not math.isfinite(value):
        return MISSING
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def stage_label(stage: str) -> str:
    """Return the name under which console and report show a stage of `timing_s/*`."""
    return "validation" if stage == "testing" else stage


def number(value: Any) -> float | None:
    """Return `value` as a float, or None if it is not a number: display must not stop a run."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True)
class Field:
    """One number on display."""

    label: str
    keys: tuple[str, ...]
    """Metric names; the first one present is shown."""
    form: Callable[[float], str]

    def read(self, values: Mapping[str, Any]) -> float | None:
        """Return the number, or None when no key has one."""
        for key in self.keys:
            found = number(values.get(key))
            if found is not None:
                return found
        return None

    def show(self, values: Mapping[str, Any]) -> str:
        """Return the number as text, "-" when it is missing."""
        found = self.read(values)
        return MISSING if found is None else self.form(found)


REWARD = Field("reward", ("reward", "critic/rewards/mean"), decimals(3))
LOSS = Field("loss", ("actor/loss",), decimals(3))
KL = Field("kl", ("kl", "actor/kl_loss"), decimals(3))
ENTROPY = Field("entropy", ("actor/entropy", "entropy"), decimals(2))
LENGTH = Field("length", ("response_length/mean",), decimals(1))
TRUNCATED = Field("truncated", ("response_length/clip_ratio",), percent)
ZERO_STD_GROUPS = Field("zero-std", ("frac_reward_zero_std",), percent)
CLIPPED = Field("clipped", ("actor/pg_clipfrac",), percent)
LR = Field("lr", ("actor/lr",), lambda value: f"{value:.3g}")
GRAD_NORM = Field("grad norm", ("actor/grad_norm",), decimals(3))
THROUGHPUT = Field("tokens/s", ("perf/throughput",), decimals(0))
VALIDATION_LOSS = Field("validation loss", ("val/loss",), decimals(3))
ACCURACY = Field("accuracy", ("reward_model/accuracy",), decimals(3))
VALIDATION_ACCURACY = Field("validation accuracy", ("val/accuracy",), decimals(3))
TOKENS = Field("tokens", ("perf/total_num_tokens",), decimals(0))


def validation_numbers(values: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Return {(source, what): number} for the validation metrics that a person is shown.

    `val-core/<source>/reward/greedy` is ("<source>", "greedy"), `val-core/<source>/reward/mean@4` is ("<source>",
    "mean@4"); a metric other than the reward keeps its name ("acc greedy"). A source may hold slashes.
    """
    found: dict[tuple[str, str], float] = {}
    for key, value in values.items():
        parts = key.split("/")
        shown = parts[-1] == "greedy" or parts[-1].startswith("mean@")
        read = number(value)
        if parts[0] == "val-core" and len(parts) >= 4 and shown and read is not None:
            what = parts[-1] if parts[-2] == "reward" else f"{parts[-2]} {parts[-1]}"
            found["/".join(parts[1:-2]), what] = read
    return found


def validation_errors(values: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Return {(source, what): standard error} of the validation metrics that have one, as `validation_numbers` does."""
    suffix = "/stderr"
    errors = {
        "val-core" + name.removeprefix("val-aux").removesuffix(suffix): value
        for name, value in values.items()
        if name.startswith("val-aux/") and name.endswith(suffix)
    }
    return validation_numbers(errors)


def validation_texts(values: Mapping[str, Any]) -> list[str]:
    """Return one text per source, `<source>  greedy 0.953  mean@4 0.881`, and one of a validation loss and accuracy.

    Where not all rows were read, each ends with `256 of 300 rows`.
    """
    by_source: dict[str, str] = {}
    for (source, what), value in validation_numbers(values).items():
        by_source[source] = by_source.get(source, source) + f"  {what} {value:.3f}"
    shown = (("loss", VALIDATION_LOSS), ("accuracy", VALIDATION_ACCURACY))
    supervised = "  ".join(f"{what} {each.show(values)}" for what, each in shown if each.read(values) is not None)
    texts = [*by_source.values(), *([supervised] if supervised else [])]
    rows = rows_text(values)
    return [f"{text}  ({rows})" for text in texts] if rows else texts


def rows_text(values: Mapping[str, Any]) -> str | None:
    """Return `256 of 300 rows` for a validation that did not read all, else None."""
    read, available = (number(values.get(f"val-aux/{name}")) for name in ("rows", "rows_available"))
    return None if read is None or available is None else f"{read:,.0f} of {available:,.0f} rows"
