"""Reading what triton-ascend makes of a kernel, its linalg text: what must not be in it, and how much is alive at once.

triton-ascend turns some programs into IR that nothing can run, or that runs one number at a time, and says nothing.
"""

import re
from typing import NamedTuple

_BITS = {"f32": 32, "i32": 32, "bf16": 16, "f16": 16, "i64": 64, "f64": 64, "i1": 8, "i8": 8}
_TYPE = re.compile(r"(tensor|memref)<((?:\d+x)+)(\w+)")
_VALUE = re.compile(r"%[\w]+")
_OPERATION = re.compile(r"(%\w+)(?::\d+)? = ([\w.]+)")
# Other names of a buffer, and shapes without one.
_ALIASES = ("bufferization.to_tensor", "tensor.expand_shape", "tensor.collapse_shape", "memref.subview")
_NO_BUFFER = ("memref.reinterpret_cast", "tensor.empty")


def violations(text: str) -> list[str]:
    """Return what in the linalg text of a vector kernel must not be there; each entry begins with its kind."""
    found = []
    for line in map(str.strip, text.splitlines()):
        if "inline_asm" in line:
            found.append(f"inline asm: {line}")
        if "func.func private" in line:
            found.append(f"unresolved function: {line}")
        if re.search(r"(?:^|= )tt\.", line):
            found.append(f"Triton operation left: {line}")
        if re.match(r"(?:%.* = )?scf\.for .* = %c\d+(?:_\w+)? to %c\d+(?:_\w+)? ", line) or "DiscreteMemAccess" in line:
            found.append(f"loop over single numbers: {line}")
        elements = [_elements(shape) for _, shape, kind in _TYPE.findall(line) if kind[0] == "i" and kind[1:].isdigit()]
        if "arith.cmpi" in line and max(elements, default=1) > 1:
            found.append(f"compare of integer vectors: {line}")
        if any(
            kind == "i64" and _elements(shape) > 1 for space, shape, kind in _TYPE.findall(line) if space == "tensor"
        ):
            found.append(f"vector of 64-bit integers: {line}")
    modes = re.findall(r'mix_mode = "(\w+)"', text)
    if modes != ["aiv"]:
        found.append(f"not for vector cores alone: mix_mode {modes}")
    return found


class Loop(NamedTuple):
    """A loop inside the loop over rows: its lines."""

    lines: tuple[str, ...]

    @property
    def is_masked(self) -> bool:
        """Whether it copies a part of a block, whose length is known when it runs."""
        return any("memref.subview" in line for line in self.lines)


def block_loops(text: str) -> list[Loop]:
    """Return the loops over blocks of a persistent kernel, in order."""
    lines = text.splitlines()
    return [Loop(tuple(lines[start:end])) for start, end, depth in _loops(lines) if depth == 1]


def single_reads_kept_inside(text: str, kind: str) -> list[bool]:
    """Return, for each read of one number of a type at a row's start plus a place, whether the place is a minimum."""
    minima = set(re.findall(r"(%\w+) = arith\.minsi %\w+, %\w+ : i32", text))
    indices = dict(re.findall(r"(%\w+) = arith\.index_cast (%\w+) : i32 to index", text))
    sums = dict(re.findall(r"(%\w+) = arith\.addi %\w+, (%\w+) : index", text))
    one = rf"reinterpret_cast %\w+ to offset: \[(%\w+)\], sizes: \[1\].* : memref<\?x{kind}>"
    return [indices.get(sums[place]) in minima for place in re.findall(one, text) if place in sums]


def peak_bytes(text: str, block: int) -> int:
    """Return the most bytes of block-sized buffers alive at one line of the text, were none re-used in place.

    What is defined before a loop and read inside is alive to the loop's end. A constant filled over a block counts
    where `select` reads it, and not where arithmetic does, which takes a number beside a vector.
    """
    lines = [line.strip() for line in text.splitlines()]
    loops = _loops(lines)
    scopes: list[dict[str, int]] = [{}]  # name -> line of the buffer it stands for; names return in later scopes
    sizes: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, line in enumerate(lines):
        if line.startswith("}"):
            scopes.pop()
        made = _OPERATION.match(line)
        operation = made[2] if made else ""
        arithmetic = operation.startswith(("arith.", "math.")) and operation != "arith.select"
        reads = _VALUE.findall(line.split(" = ", 1)[1] if made else line)
        buffers = [buffer for name in reads if (buffer := _look_up(scopes, name)) is not None]
        for buffer in buffers:
            if arithmetic and "= linalg.fill" in lines[buffer]:
                continue
            ends = [end for start, end, _ in loops if buffer < start < number < end]
            last[buffer] = max([last.get(buffer, 0), number, *ends])
        if made and operation in _ALIASES:
            if buffers:
                scopes[-1][made[1]] = buffers[0]
        elif made and operation not in _NO_BUFFER and operation != "scf.for":
            size = _bytes_of_blocks(line, block)
            if size:
                scopes[-1][made[1]] = number
                sizes[number] = size
        if line.endswith("{"):
            scopes.append({})
    return max(
        sum(size for born, size in sizes.items() if born <= number <= last.get(born, -1))
        for number in range(len(lines))
    )


def _elements(shape: str) -> int:
    product = 1
    for size in shape.rstrip("x").split("x"):
        product *= int(size)
    return product


def _bytes_of_blocks(line: str, block: int) -> int:
    """Return the bytes of the value a line defines if that has the size of a block, else 0: its type comes last."""
    types = _TYPE.findall(line)
    if not types or _elements(types[-1][1]) != block:
        return 0
    return block * _BITS[types[-1][2]] // 8


def _look_up(scopes: list[dict[str, int]], name: str) -> int | None:
    return next((scope[name] for scope in reversed(scopes) if name in scope), None)


def _loops(lines: list[str]) -> list[tuple[int, int, int]]:
    """Return (first line, last line, loops around it) of each scf.for, in order."""
    opened: list[tuple[int, bool]] = []
    found = []
    for number, line in enumerate(lines):
        if line.strip().startswith("}"):
            start, is_loop = opened.pop()
            if is_loop:
                found.append((start, number, sum(loop for _, loop in opened)))
        if line.rstrip().endswith("{"):
            opened.append((number, "scf.for " in line))
    return sorted(found)
