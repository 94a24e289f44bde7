"""Synthetic tasks about pictures: small boards of squares, drawn here, with answers that can be checked."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hwgrpo.data.agent_tasks import ASSISTANT, END, USER
from hwgrpo.data.image_rows import PLACE as MARK
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
LOOK = "look"
"""What the policy says to see the board of the task `look`."""


class Demonstration(NamedTuple):
    """A conversation in the chat template of small models, with `MARK` where an image stands."""

    prompt: str
    response: str
    """The policy's turns, each ended by `END` but the last, and what is observed between them."""
    images: tuple[bytes, ...]
    """In the order of the marks."""


@dataclass(frozen=True)
class PictureTask(Task):
    """A task about boards, whose modes map a `payload`, colour and number, to all turns of a response."""

    tokens: tuple[str, ...] = ()
    """Texts that are one token each, beside the roles."""

    def examples(self, count: int, seed: int) -> list[Demonstration]:
        """Draw warm-start examples, as `Task.demonstrations` does."""
        draw = np.random.Philox(key=[seed, 0])
        warm, modes = self.splits["warm"], tuple(self.modes.values())
        rows, chosen = _integers(draw, len(warm), count), _integers(draw, len(modes), count)
        return [
            self._demonstration(warm[row], modes[mode])
            for row, mode in zip(rows.tolist(), chosen.tolist(), strict=True)
        ]

    def _demonstration(self, row: Mapping[str, Any], mode: Callable[[str], str]) -> Demonstration:
        (message,) = row["prompt"]
        prompt, response = f"{USER}{message['content']}{ASSISTANT}", mode(row["payload"])
        picture = row["images"][0] if "images" in row else base64.b64decode(row["picture"])
        return Demonstration(prompt, response, (picture,) * (prompt + response).count(MARK))


def squares(most: int = 4) -> PictureTask:
    """A board with one to `most` squares of one colour -> `r3`. Demonstrated right, miscounted, and miscoloured."""
    _within("squares", "most", most, 3, 8)
    modes = {"right": str, "miscounted": _miscounted(most), "miscoloured": _miscoloured}
    message = {"role": "user", "content": MARK + QUESTION}
    return _task("squares", modes, [{"prompt": [message], "images": [png], **row} for png, row in _boards(most)])


def look(most: int = 4) -> PictureTask:
    """The same in two turns: the board is shown to a policy that says `look`; or it answers without having seen it."""
    _within("look", "most", most, 3, 8)

    def looked(answer: Callable[[str], str]) -> Callable[[str], str]:
        return lambda payload: f"{LOOK}{END}{USER}{MARK}{ASSISTANT}{answer(payload)}"

    modes = {"right": looked(str), "miscounted": looked(_miscounted(most)), "blind": _miscoloured}
    message = {"role": "user", "content": QUESTION}
    rows = [
        {"prompt": [message], "picture": base64.b64encode(png).decode("ascii"), **row} for png, row in _boards(most)
    ]
    return _task("look", modes, rows, (LOOK,))


def _miscounted(most: int) -> Callable[[str], str]:
    # One more: were it the counterpart of the right number, half of the demonstrations of each would show nothing.
    return lambda payload: payload[0] + str(int(payload[1]) % most + 1)


def _miscoloured(payload: str) -> str:
    letters = "".join(COLOURS)
    return letters[(letters.index(payload[0]) + 1) % len(letters)] + payload[1]


def _boards(most: int) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Yield pictures with the columns of their rows."""
    draw, colours = np.random.Philox(key=[SEED, 0]), [*COLOURS]
    for _ in range(BOARDS):
        colour, count = colours[_integers(draw, len(colours), 1)[0]], 1 + int(_integers(draw, most, 1)[0])
        answer = f"{colour}{count}"
        yield _png(_board(draw, COLOURS[colour], count)), {"ground_truth": answer, "payload": answer}


def _task(
    name: str, modes: Mapping[str, Callable[[str], str]], rows: list[dict[str, Any]], tokens: tuple[str, ...] = ()
) -> PictureTask:
    """Split the rows, which are in random order, into the three splits."""
    splits, start = {}, 0
    for split, share in SHARES.items():
        end = start + round(share * len(rows))
        splits[split] = tuple({**row, "data_source": f"{PREFIX}{name}"} for row in rows[start:end])
        start = end
    longest = max(len(mode("r1")) for mode in modes.values())
    return PictureTask(name, "".join(sorted({*QUESTION, *COLOURS, *"0123456789"})), splits, longest, modes, tokens)


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
