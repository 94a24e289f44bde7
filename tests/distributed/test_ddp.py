"""Two processes over gloo give what one gives."""

from pathlib import Path

import pytest
import torch
from ddp_worker import run_update
from launch import ROOT, torchrun
from safetensors.torch import load_file

from hwgrpo.errors import ConfigError
from hwgrpo.training.strategies.ddp import Ddp
from hwgrpo.training.strategies.single import Single


@pytest.mark.parametrize(
    ("middle", "words"),
    [
        (2, []),
        (1, ["trainer.tokens_per_micro_batch=32", "algorithm.aggregation.name=seq-mean-token-mean"]),
        (4, []),
    ],
    ids=["even shares", "ragged shares, unequal micro-batch counts", "one rank has nothing"],
)
def test_two_ranks_have_the_gradient_loss_and_metrics_of_one(tmp_path: Path, middle: int, words: list[str]):
    out = tmp_path / "two.safetensors"
    done = torchrun(2, str(ROOT / "tests/support/ddp_worker.py"), str(out), str(middle), *words)
    assert done.returncode == 0, done.stderr[-3000:]
    two = load_file(out)
    one = run_update(Single(torch.device("cpu"), "gloo"), words, [0, 4])
    assert two.keys() == one.keys()
    for name, expected in one.items():
        error = (two[name].double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-12)
        assert error < 1e-5, f"{name}: {error:.2e}"


CLOSE = """
import glob
import torch
from hwgrpo_kernels import linear_logprob
from hwgrpo.training.strategies.ddp import Ddp

def threads():
    return [name for task in glob.glob("/proc/self/task/*/comm") if "gloo" in (name := open(task).read())]

ddp = Ddp(torch.device("cpu"), "gloo")
assert threads()
model = torch.nn.Linear(8, 8)
ddp.wrap(model)
ddp.module(torch.randn(4, 8)).sum().backward()
linear_logprob(torch.randn(4, 8), model.weight, torch.arange(4)).logprob.sum().backward()
ddp.close()
assert not threads(), threads()
"""


def test_no_thread_of_the_group_outlives_close(tmp_path: Path):
    """One that did would abort the process now and then as the interpreter ends ("terminate called ...")."""
    (tmp_path / "close.py").write_text(CLOSE)
    done = torchrun(2, str(tmp_path / "close.py"))
    assert done.returncode == 0, done.stderr[-3000:]


def test_ddp_outside_torchrun_says_how_to_start_it():
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node"):
        Ddp(torch.device("cpu"), "gloo")
