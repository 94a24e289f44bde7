"""What a compiled Triton kernel is made of, read from its assembly: registers, spills, memory accesses, loops."""

import functools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

_LABEL = re.compile(r"^(\$L__BB\w+|\.LBB\w+):")
_BRANCH = re.compile(r"\b(?:bra|bra\.uni|s_c?branch\w*)\s+(\$L__BB\w+|\.LBB\w+)")
_PTX_ACCESS = re.compile(r"\b(ld|st)\.(?:\w+\.)?global([.\w:]*)\s")
_AMD_ACCESS = re.compile(r"^\s+(?:global|buffer|flat)_(load|store)_(\w+)", re.M)
_PTX_ATOMIC = re.compile(r"\b(?:atom|red)\.")
_AMD_INSTRUCTION = re.compile(r"^\s+([vs]_.*|ds_.*|(?:global|buffer|flat)_.*)", re.M)
_AMD_LOAD = re.compile(r"(?:global|buffer|flat)_load")
_AMD_ATOMIC = re.compile(r"^\s+(?:\w+_atomic_?\w*|ds_(?:add|sub|inc|dec|min|max|and|or|xor|cmpst|cmpstore)_\w+)", re.M)
_PTX_NAN_MAX = re.compile(r"\bmax\.NaN\.f32\b|\bselp\.f64\s+%\w+, 0d7FF8000000000000,")  # fp64: NaN put in by hand
_AMD_NAN_TEST = re.compile(r"\bv_(?:cmpx?_[ou]|maximum3?)_f(?:32|64)")
_AMD_BF16_ROUNDING = re.compile(r"\bv_bfe_u32 .*, 16, 1$", re.M)


class Binary:
    """A kernel compiled for a GPU.

    Args:
        kernel: what Triton's JIT compiled.
    """

    def __init__(self, kernel: Any):
        self.name: str = kernel.metadata.name
        self.nvidia = kernel.metadata.target.backend == "cuda"
        self.threads: int = kernel.metadata.num_warps * kernel.metadata.target.warp_size
        self.shared: int = kernel.metadata.shared
        self.assembly: str = kernel.asm["ptx" if self.nvidia else "amdgcn"]
        self._binary: bytes = kernel.asm["cubin" if self.nvidia else "hsaco"]
        self.loops = list(_innermost_loops(self.assembly))

    @functools.cached_property
    def figures(self) -> dict[str, Any]:
        """Return the figures worth following from one version of a kernel or compiler to the next.

        Returns:
            registers per thread; spilled: bytes per thread of registers kept in memory; scalar_spills: AMD's registers
            of a wavefront kept in lanes of vector registers (no memory); shared: bytes per program; loads and stores of
            global memory in the loops, by bits per access and thread; nan_max: maxima that propagate NaN.
        """
        return {
            **(self._nvidia_resources() if self.nvidia else self._amd_resources()),
            "shared": self.shared,
            "loads": _as_table(self.in_loops("load")),
            "stores": _as_table(self.in_loops("store")),
            "nan_max": self.nan_maxima(),
        }

    def accesses(self, kind: str, text: str) -> Iterator[int]:
        """Yield the bits of each access of global memory in a piece of the assembly; `kind` is "load" or "store"."""
        if self.nvidia:
            for what, modifiers in _PTX_ACCESS.findall(text):
                if what == {"load": "ld", "store": "st"}[kind]:
                    vector = re.search(r"\.v(\d)", modifiers)
                    element = re.search(r"\.[bfsu](\d+)", modifiers)
                    assert element is not None, f"an access of unknown width: {what}.global{modifiers}"
                    yield int(element[1]) * (int(vector[1]) if vector else 1)
        else:
            for what, width in _AMD_ACCESS.findall(text):
                if what == kind:
                    yield _amd_bits(width)

    def in_loops(self, kind: str) -> list[int]:
        """Return the bits of each access of global memory in the loops; `kind` is "load" or "store"."""
        return [bits for loop in self.loops for bits in self.accesses(kind, loop)]

    def share_in_flight(self) -> float:
        """Return the share of an AMD loop's instructions between its last load and the next wait for memory.

        The wait may be in the next pass. Of several loops, the largest share.
        """
        assert not self.nvidia
        return max((_share_in_flight(loop) for loop in self.loops), default=0.0)

    def atomics(self) -> list[str]:
        """Return the atomic operations, compare-and-swap among them."""
        return (_PTX_ATOMIC if self.nvidia else _AMD_ATOMIC).findall(self.assembly)

    def nan_maxima(self) -> int:
        """Count the maxima that are NaN where an operand is.

        Most AMD chips have none, and test for NaN beside each; those which round to bf16 by hand test there as well.
        """
        if self.nvidia:
            return len(_PTX_NAN_MAX.findall(self.assembly))
        return len(_AMD_NAN_TEST.findall(self.assembly)) - len(_AMD_BF16_ROUNDING.findall(self.assembly))

    def _nvidia_resources(self) -> dict[str, int]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self._binary)
            file.flush()
            command = [_CUOBJDUMP, "--dump-resource-usage", file.name]
            report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        usage = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
        return {"registers": usage["REG"], "spilled": usage["STACK"] + usage["LOCAL"]}

    def _amd_resources(self) -> dict[str, int]:
        def note(key: str) -> int:
            found = re.search(rf"\.{key}:\s+(\d+)", self.assembly)
            assert found is not None, f"the assembly of {self.name} does not say {key}"
            return int(found[1])

        return {
            "registers": note("vgpr_count"),
            "spilled": max(note("private_segment_fixed_size"), 4 * note("vgpr_spill_count")),
            "scalar_spills": note("sgpr_spill_count"),
        }


def _innermost_loops(assembly: str) -> Iterator[str]:
    """Yield the text from each label to the last branch back to it, where no other such text lies within."""
    lines = assembly.splitlines()
    labels = {found[1]: number for number, line in enumerate(lines) if (found := _LABEL.match(line))}
    ends: dict[int, int] = {}
    for number, line in enumerate(lines):
        for label in _BRANCH.findall(line):
            if labels[label] <= number:
                ends[labels[label]] = number
    for start, end in ends.items():
        if not any(start <= other and ends[other] <= end for other in ends if other != start):
            yield "\n".join(lines[start : end + 1])


def _share_in_flight(loop: str) -> float:
    lines = _AMD_INSTRUCTION.findall(loop)
    loads = [number for number, line in enumerate(lines) if _AMD_LOAD.match(line)]
    if not loads:
        return 0.0
    after = [*lines[loads[-1] + 1 :], *lines[: loads[0]]]
    return next((number for number, line in enumerate(after) if "vmcnt" in line), 0) / len(lines)


def _amd_bits(width: str) -> int:
    """Bits of "dwordx4", "b128", "ushort", "u16", "d16_hi_b16", ..."""
    if found := re.match(r"dword(?:x(\d))?$", width):
        return 32 * int(found[1] or 1)
    if found := re.search(r"(byte|short)", width):
        return {"byte": 8, "short": 16}[found[1]]
    found = re.search(r"[biu](\d+)$", width)
    assert found is not None, f"an access of unknown width: {width}"
    return int(found[1])


def _as_table(bits: list[int]) -> dict[str, int]:
    return {str(width): number for width, number in sorted(Counter(bits).items())}
