"""Synthetic tasks about pictures: small boards of squares, drawn here, with answers that can be checked."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwgrpo.data.tasks import PREFIX, SEED, SHARES, Task, _integers, _within

COLOURS: Mapping[str, tuple[int, int, int]] = {
    "r": (220, 40, 40),
    "g": (40, 200, 60),
    "b": (50, 70, 230),
    "y": (230, 220, 40),
}
"""Letter -> red, green, blue."""
CELLS, CELL = 4, 8
"""Cells of a side of the board, and pixels of a side of a cell."""
SIDE = CELLS * CELL
NOISE = 24
"""Largest change of a pixel's colour."""
BOARDS = 2_000
QUESTION = "what?"
LONGEST = 2
"""Characters of an answer: a colour and a number."""


@dataclass(frozen=True)
class PictureTask(Task):
    """A task whose rows have a column `images`; its modes map a `payload`, colour and number, to a response."""

    def examples(self, count: int, seed: int) -> list[tuple[Mapping[str, Any], str]]:
        """Draw warm-start examples as `Task.demonstrations` does; return rows and responses."""
        draw = np.random.Philox(key=[seed, 0])
        warm, modes = self.splits["warm"], tuple(self.modes.values())
        rows, chosen = _integers(draw, len(warm), count), _integers(draw, len(modes), count)
        return [
            (warm[row], modes[mode](warm[row]["payload"]))
            for row, mode in zip(rows.tolist(), chosen.tolist(), strict=True)
        ]


def squares(most: int = 4) -> PictureTask:
    """A board with one to `most` squares of one colour -> `r3`. Demonstrated right, miscounted, and miscoloured."""
    _within("squares", "most", most, 2, 8)

    def miscounted(payload: str) -> str:
        return payload[0] + str(most + 1 - int(payload[1]))

    def miscoloured(payload: str) -> str:
        letters = "".join(COLOURS)
        return letters[(letters.index(payload[0]) + 1) % len(letters)] + payload[1]

    modes = {"right": str, "miscounted": miscounted, "miscoloured": miscoloured}
    draw = np.random.Philox(key=[SEED, 0])
    colours = [*COLOURS]
    rows = []
    for _ in range(BOARDS):
        colour, count = colours[_integers(draw, len(colours), 1)[0]], 1 + int(_integers(draw, most, 1)[0])
        rows.append(
            {
                "prompt": [{"role": "user", "content": f"<image>{QUESTION}"}],
                "images": [_png(_board(draw, COLOURS[colour], count))],
                "ground_truth": f"{colour}{count}",
                "payload": f"{colour}{count}",
                "data_source": f"{PREFIX}squares",
            }
        )
    splits, start = {}, 0
    for split, share in SHARES.items():
        end = start + round(share * len(rows))
        splits[split], start = tuple(rows[start:end]), end
    return PictureTask("squares", "".join(sorted({*QUESTION, *COLOURS, *"0123456789"})), splits, LONGEST, modes)


def _board(draw: np.random.Philox, colour: tuple[int, int, int], count: int) -> np.ndarray:
    """Return [SIDE, SIDE, 3] uint8: that many cells of a colour on a dark ground, with noise."""
    cells: list[int] = []
    while len(cells) < count:
        cell = int(_integers(draw, CELLS**2, 1)[0])
        cells += [cell] if cell not in cells else []
    board = np.full((SIDE, SIDE, 3), 60, dtype=np.int64)
    for cell in cells:
        top, left = CELL * (cell // CELLS), CELL * (cell % CELLS)
        board[top + 1 : top + CELL - 1, left + 1 : left + CELL - 1] = colour
    board += _integers(draw, 2 * NOISE + 1, board.size).reshape(board.shape) - NOISE
    return board.clip(0, 255).astype(np.uint8)


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()
