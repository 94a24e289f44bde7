"""Processes over gloo give what one gives, whatever the strategy."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hwgrpo.errors import ConfigError
from hwgrpo.training.strategies.ddp import Ddp
from hwgrpo.training.strategies.deepspeed import Deepspeed
from hwgrpo.training.strategies.fsdp2 import Fsdp2
from hwgrpo.training.strategies.single import Single
from tests.distributed.strategy_worker import CASES, run_update
from tests.support.numbers.rounding import assert_updates_close
from tests.support.processes.deepspeed_package import with_deepspeed
from tests.support.processes.launch import ROOT, forked

EACH_UPDATE = ["trainer.strategy=fsdp2", "trainer.fsdp2.sync_every=update"]
WAYS = {
    "ddp": ["ddp"],
    "fsdp2": ["fsdp2"],
    "fsdp2, each update": ["fsdp2", *EACH_UPDATE],
    "fsdp2, weights kept": ["fsdp2", "trainer.strategy=fsdp2", "trainer.fsdp2.reshard_after_forward=false"],
    "fsdp2, layers cut": ["fsdp2", "trainer.strategy=fsdp2", "trainer.tensor_parallel_size=2"],
    "fsdp2, layers cut, each update": ["fsdp2", *EACH_UPDATE, "trainer.tensor_parallel_size=2"],
    "ddp, gradients on the host": ["ddp", "trainer.strategy=ddp", "trainer.offload=gradients"],
    "fsdp2, gradients on the host": ["fsdp2", "trainer.strategy=fsdp2", "trainer.offload=gradients"],
    "ddp, bf16": ["ddp", "model.dtype=bfloat16"],
    "fsdp2, bf16": ["fsdp2", "model.dtype=bfloat16"],
    "fsdp2, each update, bf16": ["fsdp2", *EACH_UPDATE, "model.dtype=bfloat16"],
}
ZERO = ["trainer.strategy=deepspeed", f"trainer.deepspeed.config={ROOT}/tests/support/runs/deepspeed.json"]
WAYS |= {f"zero-{stage}": ["deepspeed", *ZERO, f"trainer.deepspeed.stage={stage}"] for stage in (1, 2, 3)}
WAYS["zero-2, each update"] = [*WAYS["zero-2"], "trainer.deepspeed.sync_every=update"]
WAYS |= {f"{way}, bf16": [*WAYS[way], "model.dtype=bfloat16"] for way in ("zero-1", "zero-2", "zero-3")}
WAYS["zero-3, small weights kept"] = [word for word in WAYS["zero-3"] if ".config=" not in word]
Results = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def alone() -> Results:
    """What one process gives, by case."""
    return {case: run_update(Single(torch.device("cpu"), "gloo"), case) for case in CASES}


FAST = [
    ("ddp", 2),
    ("ddp", 4),
    ("fsdp2", 1),
    ("fsdp2", 2),
    ("fsdp2", 4),
    ("fsdp2, each update", 2),
    ("fsdp2, weights kept", 2),
    ("ddp, gradients on the host", 2),
    ("fsdp2, gradients on the host", 2),
]
WAYS["fsdp2, layers cut, gradients on the host"] = [*WAYS["fsdp2, layers cut"], "trainer.offload=gradients"]
FAST += [("fsdp2, layers cut, gradients on the host", 2)]
FAST += [("fsdp2, layers cut", 2), ("fsdp2, layers cut", 4), ("fsdp2, layers cut, each update", 2)]
ZERO_RUNS = [(f"zero-{stage}", ranks) for stage in (1, 2, 3) for ranks in (1, 2, 4)]
ZERO_RUNS += [("zero-3, small weights kept", 2), ("zero-2, each update", 2), ("zero-2, each update", 4)]
BF16 = {"zero-1, bf16": "ddp, bf16", "zero-2, bf16": "ddp, bf16", "zero-3, bf16": "fsdp2, bf16"}
"""Strategies with the same weights: replicated in fp32, or sharded and gathered in bf16."""
STARTS = [FAST, ZERO_RUNS + [(way, 2) for way in BF16], [(way, 2) for way in dict.fromkeys(BF16.values())]]
STARTS[2].append(("fsdp2, each update, bf16", 2))
"""Runs that may share one start of their processes, where they are of as many ranks: it takes longer than they do."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What ranks of a strategy give, by case."""
    known: dict[tuple[str, int], Results] = {}

    def of(way: str, ranks: int) -> Results:
        if (way, ranks) not in known:
            together = next(runs for runs in STARTS if (way, ranks) in runs)
            ways = {each: WAYS[each] for each, of_ranks in together if of_ranks == ranks}
            out = tmp_path_factory.mktemp("out")
            launch = with_deepspeed if WAYS[way][0] == "deepspeed" else forked
            done = launch(ranks, str(ROOT / "tests/distributed/strategy_worker.py"), str(out), json.dumps(ways))
            assert done.returncode == 0, done.stderr[-3000:]
            for each in ways:
                known[each, ranks] = {case: load_file(out / each / f"{case}.safetensors") for case in CASES}
        return known[way, ranks]

    return of


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("way", "ranks"),
    [pytest.param(way, n, marks=[pytest.mark.slow] * ((way, n) in ZERO_RUNS or n == 4)) for way, n in FAST + ZERO_RUNS],
)
def test_an_update_on_several_ranks_is_that_of_one(way: str, ranks: int, case: str, alone: Results, found):
    several, one = found(way, ranks)[case], alone[case]
    assert {"loss", "norm", "scored", "squares"} < one.keys()
    assert float(one["clipped_norm"]) == pytest.approx(0.1 * float(one["norm"]), rel=1e-3)
    assert_updates_close(several, one)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("way", "like"), BF16.items())
def test_in_bf16_zero_keeps_weights_as_the_strategy_does_that_keeps_as_much(way: str, like: str, case: str, found):
    assert_updates_close(found(way, 2)[case], found(like, 2)[case])


@pytest.mark.parametrize("case", CASES)
def test_in_bf16_gradients_reduced_once_are_summed_in_fp32_as_those_of_each_pass(case: str, found):
    assert_updates_close(found("fsdp2, each update, bf16", 2)[case], found("fsdp2, bf16", 2)[case])


CLOSE = """
import glob
import torch
from hwgrpo_kernels import linear_logprob
from tests.support.models.tiny import settings
from hwgrpo.training.strategies.ddp import Ddp

def threads():
    return [name for task in glob.glob("/proc/self/task/*/comm") if "gloo" in (name := open(task).read())]

class Policy(torch.nn.Linear):
    def set_passes(self, **options):
        pass

ddp = Ddp(torch.device("cpu"), "gloo")
assert threads()
model = Policy(8, 8)
ddp.wrap(model, settings())
ddp.module(torch.randn(4, 8)).sum().backward()
linear_logprob(torch.randn(4, 8), model.weight, torch.arange(4)).logprob.sum().backward()
ddp.close()
assert not threads(), threads()
"""


@pytest.mark.slow
def test_no_thread_of_the_group_outlives_close(tmp_path: Path):
    """One that did would abort a process now and then, when its interpreter ends ("terminate called ...")."""
    (tmp_path / "close.py").write_text(CLOSE)
    done = forked(2, str(tmp_path / "close.py"))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("strategy", [Ddp, Fsdp2, Deepspeed])
def test_a_strategy_of_several_processes_outside_torchrun_says_how_to_start_them(strategy):
    with pytest.raises(ConfigError, match=f"trainer.strategy='{strategy.name}' needs .*torchrun --nproc-per-node"):
        strategy(torch.device("cpu"), "gloo")
