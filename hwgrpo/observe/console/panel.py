"""Live panel on a terminal: progress, metrics, time per stage and one sample."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hwgrpo.observe import shown_fields
from hwgrpo.observe.console.progress import Pace
from hwgrpo.observe.shown_fields import validation_texts
from hwgrpo.observe.summary import rich_summary
from hwgrpo.observe.timing import PREFIX
from hwgrpo.support.text import one_line, terminal_lines

if TYPE_CHECKING:
    from hwgrpo.observe.completions import Sample

METRICS = (
    shown_fields.REWARD,
    shown_fields.ACCURACY,
    shown_fields.KL,
    shown_fields.ENTROPY,
    shown_fields.LENGTH,
    shown_fields.TRUNCATED,
    shown_fields.ZERO_STD_GROUPS,
    shown_fields.LR,
    shown_fields.GRAD_NORM,
    shown_fields.CLIPPED,
    shown_fields.THROUGHPUT,
)
OF_ROLLOUTS = (*(shown_fields.REWARD, shown_fields.TRUNCATED, shown_fields.ZERO_STD_GROUPS, shown_fields.CLIPPED),)
"""Metrics that supervised training does not have."""
NOT_EVERY_STEP = ("step", "testing", "save", "probe")
"""Timings without a bar: the total, and stages that are not in every step, so that the panel does not jump."""
WIDE = 110
"""Columns from which metrics and stages stand side by side."""
TREND = 40
"""Maximum number of blocks in the line of past rewards; in a long run each covers several steps."""
REFRESHES_PER_SECOND = 2
LABEL = 14
"""Columns of a label."""
_LEVELS = "▁▂▃▄▅▆▇█"


def condense(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` means of neighbouring values, of groups as equal in size as can be."""
    if len(values) <= width:
        return list(values)
    edges = [len(values) * i // width for i in range(width + 1)]
    return [statistics.fmean(values[start:end]) for start, end in pairwise(edges)]


def sparkline(values: Iterable[float], width: int) -> str:
    """Draw finite values as a line of at most `width` blocks between their least and greatest, see `condense`."""
    finite = condense([value for value in values if math.isfinite(value)], width)
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((value - low) * scale)] for value in finite)


def trend(values: Iterable[float], width: int, form: Callable[[float], str]) -> str:
    """Draw a sparkline with its scale, `▁▃█ 0.125 to 0.875`, in at most `width` cells."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return shown_fields.MISSING
    # The scale is that of what is drawn; means are no longer in print than the values that they stand for by much.
    widest = max((f" {form(value)} to {form(value)}" for value in finite), key=len)
    drawn = condense(finite, max(1, width - len(widest)))
    return f"{sparkline(drawn, len(drawn))} {form(min(drawn))} to {form(max(drawn))}"


def shorten(text: str, cells: int) -> str:
    """Return `text` without line ends and of at most `cells` terminal cells, its middle left out where it is longer.

    Line ends and other control characters are made visible, so that model output cannot steer the terminal.
    """
    # Far more than can be shown is cut before it is measured: responses may be long and this runs at every refresh.
    if len(text) > 4 * cells:
        text = text[: 2 * cells] + text[-2 * cells :]
    text = one_line(text)
    if cell_len(text) <= cells:
        return text
    tail = cells // 3
    head = set_cell_size(text, cells - tail - 3).rstrip()
    return f"{head} … {set_cell_size(text[::-1], tail)[::-1].lstrip()}"


def _bar(done: float, total: float, width: int) -> ProgressBar:
    return ProgressBar(total=total, completed=done, width=width, complete_style="cyan", finished_style="green")


@dataclass(frozen=True)
class PanelView:
    """One state of the panel. A new step makes a new view, so the drawing thread never sees half of one."""

    title: str
    pace: Pace
    started: float
    """Seconds on the clock when the panel appeared."""
    clock: Callable[[], float]
    step: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    rewards: Sequence[float] = ()
    """Of the run so far, condensed."""
    validation: str = ""
    sample: Sample | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw for the width at hand."""
        width = options.max_width - 4
        parts: list[RenderableType] = [self._headline(width), Text()]
        if width + 4 >= WIDE:
            half = width // 2 - 2
            both = Table.grid(padding=(0, 4, 0, 0))
            both.add_row(self._metrics(half), self._stages(width - half - 4, columns=1))
            parts.append(both)
        else:
            parts += [self._metrics(width), Text(), self._stages(width, columns=max(1, width // 36))]
        parts += [Text(), self._texts(width, console.encoding)]
        title = Text(f" {shorten(self.title, max(8, width // 2))} ", style="bold")
        yield Panel(Group(*parts), title=title, title_align="left", border_style="blue", width=options.max_width)

    def _headline(self, width: int) -> RenderableType:
        now = self.clock()
        done = self.step / self.pace.total if self.pace.total else 0.0
        left = f"step {self.step:,}/{self.pace.total:,}"
        remaining = shown_fields.duration(self.pace.remaining(now))
        right = f"{shown_fields.percent(done)}  {shown_fields.duration(now - self.started)}, eta {remaining}"
        grid = Table.grid(padding=(0, 2, 0, 0))
        bar = _bar(self.step, max(1, self.pace.total), max(4, width - len(left + right) - 4))
        grid.add_row(Text(left, style="bold"), bar, Text(right, no_wrap=True))
        return grid

    def _metrics(self, width: int) -> RenderableType:
        supervised = shown_fields.REWARD.read(self.values) is None and shown_fields.LOSS.read(self.values) is not None
        hidden = OF_ROLLOUTS if supervised else ()
        optional = (shown_fields.KL, shown_fields.ACCURACY)
        shown = [metric for metric in METRICS if metric not in optional or metric.read(self.values) is not None]
        shown = [shown_fields.LOSS] * supervised + [metric for metric in shown if metric not in hidden]
        columns = max(1, width // (LABEL + 10))
        cell = width // columns
        lines = []
        for start in range(0, len(shown), columns):
            line = Text(no_wrap=True)
            for metric in shown[start : start + columns]:
                line.append(f"{metric.label:<{LABEL}}", style="dim")
                style = "bold green" if metric in (shown_fields.REWARD, shown_fields.LOSS) else ""
                line.append(f"{metric.show(self.values):<{cell - LABEL}}", style=style)
            lines.append(line)
        return Group(*lines)

    def _stages(self, width: int, columns: int) -> RenderableType:
        took = {
            name.removeprefix(PREFIX): spent
            for name, value in self.values.items()
            if name.startswith(PREFIX) and (spent := shown_fields.number(value)) is not None and 0 < spent < math.inf
        }
        total = max(took.get("step", 0.0), sum(spent for stage, spent in took.items() if stage != "step"))
        stages = [(stage, spent) for stage, spent in took.items() if stage not in NOT_EVERY_STEP]
        if not stages:
            return Text("time per stage  -", style="dim")
        cell = width // columns
        bar = max(3, cell - LABEL - 17)
        grid = Table.grid(padding=(0, 1, 0, 0))
        for start in range(0, len(stages), columns):
            row: list[RenderableType] = []
            for stage, spent in stages[start : start + columns]:
                row.append(Text(f"{stage[: LABEL - 1]:<{LABEL - 1}}", style="dim"))
                row.append(_bar(spent, total, bar))
                row.append(Text(f"{shown_fields.seconds(spent):>7} {shown_fields.percent(spent / total):>4} "))
            grid.add_row(*row)
        return Group(Text(f"this step took {shown_fields.seconds(total)}", style="dim"), grid)

    def _texts(self, width: int, encoding: str) -> RenderableType:
        room = width - LABEL
        rows: list[tuple[str, str, int]] = []  # label, text, the most lines it may take
        if len(self.rewards) > 1 and encoding.startswith("utf"):
            rows.append(("rewards", trend(self.rewards, min(TREND, room), shown_fields.REWARD.form), 1))
        if self.validation:
            rows.append(("validation", self.validation, 2))
        if self.sample is not None:
            reward = shown_fields.MISSING if self.sample.reward is None else f"{self.sample.reward:.3f}"
            rows += [("prompt", self.sample.prompt, 2), ("response", self.sample.response, 3)]
            if self.sample.ground_truth is not None:
                rows.append(("ground truth", str(self.sample.ground_truth), 1))
            rows.append(("sample reward", reward, 1))
        else:
            rows.append(("sample", shown_fields.MISSING, 1))
        grid = Table.grid()
        grid.add_column(width=LABEL, style="dim")
        grid.add_column(width=room, overflow="fold")
        for label, text, lines in rows:
            # Wrapping at words may need more lines than cells; a tenth of slack is enough for most texts.
            grid.add_row(label, Text(shorten(text, room if lines == 1 else room * lines * 9 // 10)))
        return grid


class LivePanel:
    """Keeps a panel at the bottom of a terminal; notes and other output scroll above it.

    Args:
        console: the terminal.
        title: heading of the panel.
        total_steps: steps of the run.
        clock: seconds from any origin.
    """

    def __init__(
        self, console: Console, title: str, total_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._clock = clock
        self._rewards: list[float] = []
        self.view = PanelView(title, Pace(total_steps), clock(), clock)
        self._live = Live(
            console=console, get_renderable=lambda: self.view, refresh_per_second=REFRESHES_PER_SECOND, transient=False
        )

    def begin(self, step: int, rewards: Sequence[float] = ()) -> None:
        self._rewards = list(rewards)
        self.view = replace(
            self.view,
            step=step,
            pace=self.view.pace.mark(step, self._clock()),
            rewards=condense(self._rewards, TREND),
        )
        self._live.start()

    def step(self, step: int, values: Mapping[str, Any], sample: Sample | None) -> None:
        reward = shown_fields.REWARD.read(values)
        if reward is not None and math.isfinite(reward):
            self._rewards.append(reward)
        self.view = replace(
            self.view,
            step=step,
            pace=self.view.pace.mark(step, self._clock()),
            values=dict(values),
            rewards=condense(self._rewards, TREND),
            sample=sample,
        )
        self._live.start()

    def validation(self, step: int, values: Mapping[str, Any]) -> None:
        if texts := validation_texts(values):
            self.view = replace(self.view, validation=f"step {step:,}: {', '.join(texts)}")

    def note(self, text: str) -> None:
        self._console.print(Text(terminal_lines(text)))

    def warning(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"))

    def summary(self, summary: Mapping[str, Any]) -> None:
        self.close()
        self._console.print(rich_summary(summary))

    def close(self) -> None:
        self._live.stop()
