"""The tests of the sampling kernels see what they are there for: plant a mistake, and one of them fails."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hwgrpo_kernels import sampling_kernels, sampling_triton

from tests.interpreter import test_sampling
from tests.interpreter.test_sampling import _interpreted  # noqa: F401  the kernels are selected here, too

SOURCE = Path(sampling_kernels.__file__)


def plain() -> None:
    test_sampling.test_tokens_and_log_probs_are_those_of_draw(257, torch.float32, 0.6)


def blocks() -> None:
    test_sampling.test_tokens_and_log_probs_are_those_of_draw(5003, torch.float32, 0.6)


def filtered(filters: dict[str, float]) -> Callable[[], None]:
    return lambda: test_sampling.test_filters_keep_what_draw_keeps(filters, torch.bfloat16, 1.0)


def greedy() -> None:
    test_sampling.test_greedy_takes_the_first_maximum_at_any_temperature(257, torch.float32)


MUTANTS = {
    "the block before": (plain, "j = block * BLOCK + k", "j = tl.maximum(block - 1, 0) * BLOCK + k"),
    "a place too far": (plain, "block * BLOCK + place, -1)", "block * BLOCK + place + 1, -1)"),
    "sums without the maximum": (plain, 'tl.where(m == float("-inf"), 0.0, m)[:, None]), 1)', "0.0), 1)"),
    "a log-prob that is not normalised": (plain, "z_t - top - tl.log(total)", "z_t - top"),
    "no temperature": (plain, "x = tl.div_rn(x, temperature)", "x = x"),
    "sums in the block from 0": (blocks, "before + tl.cumsum(e, 0)", "tl.cumsum(e, 0)"),
    "a level of the next row": (plain, "* uniform_stride) * total", "* 0) * total"),
    "dead rows draw": (plain, "tl.where(alive, block * BLOCK + place, -1)", "block * BLOCK + place"),
    "the last maximum": (
        greedy,
        "place = tl.min(tl.where(z == top, k, BLOCK - 1), 0)",
        "place = tl.max(tl.where(z == top, k, 0), 0)",
    ),
    "ties of top-k dropped": (filtered({"top_k": 5}), "kept = (x >= least_x)", "kept = (x > least_x)"),
    "one token too many": (filtered({"top_k": 5}), "enough = count >= aim", "enough = count > aim"),
    "a floor of the other sign": (filtered({"min_p": 0.1}), "* 0.5 - tl.log(total)", "* 0.5 + tl.log(total)"),
    "dropped tokens are drawn": (
        filtered({"top_k": 5}),
        "e = tl.where(z >= tl.load(threshold + row), e, 0.0)",
        "e = e * 1.0",
    ),
    "top-p of all tokens": (filtered({"top_k": 20, "top_p": 0.9, "min_p": 0.02}), "top_p * mass", "top_p * total"),
    "zeros of two signs": (
        filtered({"top_k": 1}),
        "bits = tl.where(x == 0.0, 0.0, x)",
        "bits = x",
    ),
    "tiles of the search are left out": (
        filtered({"top_k": 300}),
        "0) >= lowest:\n            token = tile * LANES",
        "0) >= top:\n            token = tile * LANES",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_sees(name, monkeypatch, tmp_path):
    check, before, after = MUTANTS[name]
    source = SOURCE.read_text()
    assert source.count(before) == 1, f"the mutant's snippet is {source.count(before)} times in {SOURCE.name}: {before}"
    monkeypatch.setattr(sampling_triton, "_kernels", load(source.replace(before, after), tmp_path))
    with pytest.raises(AssertionError):
        check()


def load(source: str, folder: Path) -> Any:
    """Import kernels from a file of their own: the interpreter compiles each function anew from where it stands."""
    file = folder / "planted_kernels.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("planted_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
