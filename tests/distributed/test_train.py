"""`torchrun -m hwgrpo train`: the same run on two processes, and a failure on one of them."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from hwgrpo.config.load import to_yaml
from tests.support.numbers.rounding import GENTLE, assert_gradients_close, assert_metrics_close, drift
from tests.support.processes.deepspeed_package import with_deepspeed
from tests.support.processes.launch import ROOT, forked, torchrun
from tests.support.runs import runs

REWARD = """
import os

def fails_on_rank_1(data_source, solution_str, ground_truth, extra_info=None):
    if os.environ.get("RANK") == "1":
        raise KeyError("no such answer")
    return 1.0
"""


LORA = ("model.lora.rank=4", "model.lora.dropout=0")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def words(output: Path, *more: str) -> list[str]:
    recipe = output.with_suffix(".yaml")
    recipe.write_text(to_yaml(runs.small(output, *more)))
    return ["-m", "hwgrpo", "train", str(recipe)]


WAYS = {
    "ddp": ["trainer.strategy=ddp"],
    "fsdp2": ["trainer.strategy=fsdp2"],
    "sequences shared": ["trainer.strategy=ddp", "trainer.sequence_parallel_size=2", "model.layout=grouped"],
    "layers cut": [
        "trainer.strategy=fsdp2",
        "trainer.tensor_parallel_size=2",
        "model.path=builtin://tiny?task=sort&hidden=64&layers=1&steps=30&batch=32&digits=3",  # two key-value heads
    ],
    "zero-1": ["trainer.strategy=deepspeed", "trainer.deepspeed.stage=1"],
    "zero-2": ["trainer.strategy=deepspeed"],
    "zero-3": ["trainer.strategy=deepspeed", "trainer.deepspeed.stage=3"],
    "zero-3, sequences shared": [
        "trainer.strategy=deepspeed",
        "trainer.deepspeed.stage=3",
        "trainer.sequence_parallel_size=2",
    ],
    "zero-3, LoRA, layers recomputed": [
        "trainer.strategy=deepspeed",
        f"trainer.deepspeed.config={ROOT}/tests/support/runs/deepspeed.json",
        "trainer.deepspeed.stage=3",
        "model.gradient_checkpointing=true",
        *LORA,
    ],
    "fsdp2, LoRA, layers recomputed": ["trainer.strategy=fsdp2", "model.gradient_checkpointing=true", *LORA],
}


@pytest.mark.parametrize("way", [pytest.param(w, marks=[pytest.mark.slow] * w.startswith("zero")) for w in WAYS])
def test_two_processes_train_like_one(way: str, tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HWGRPO_CACHE", cache)
    strategies = [
        word
        for word in WAYS[way]
        if word.startswith(("trainer.strategy", "trainer.deepspeed", "trainer.seq", "trainer.tensor"))
    ]
    others = [word for word in WAYS[way] if word not in strategies]
    decay = "optim.weight_decay=1.0"  # of matrices alone, which may have lost their shape when the optimizer is made
    more = ("trainer.max_steps=3", "algorithm.kl.coef=0.05", "trainer.prompts_per_update=2", decay, *GENTLE, *others)
    launch = with_deepspeed if way.startswith("zero") else forked
    done = launch(2, *words(tmp_path / "two", *more, *strategies))
    assert done.returncode == 0, done.stderr[-3000:]
    assert runs.forked(lambda: runs.run(tmp_path / "one", *more)) == 0
    two, one = runs.metrics(tmp_path / "two"), runs.metrics(tmp_path / "one")
    assert len(two) == len(one) == 5
    limit = drift(6)  # two updates of each step
    assert_metrics_close(two, one, limit)
    finals = [sorted((tmp_path / each).glob("final*/*.safetensors")) for each in ("two", "one")]
    assert [path.name for path in finals[0]] == [path.name for path in finals[1]] != []
    for left, right in zip(*finals, strict=True):
        assert_gradients_close(load_file(left), load_file(right), limit)


@pytest.mark.slow
def test_a_reward_that_fails_on_one_rank_ends_all_with_its_message_and_leaves_no_process(tmp_path: Path, cache: str):
    (tmp_path / "rewards.py").write_text(REWARD)
    reward = f"reward.functions=['{tmp_path}/rewards.py:fails_on_rank_1']"
    done = torchrun(2, *words(tmp_path / "run", reward, "trainer.validate_at_start=false"), HWGRPO_CACHE=cache)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if "hwgrpo: error" in line]
    assert errors, done.stderr[-3000:]
    assert all("raised KeyError: 'no such answer'" in line for line in errors)
    assert "gloo" not in done.stderr, "another rank told of its broken connection instead"


def starved(ranks: str, *arguments: str) -> list[str]:
    """Return the words that train with no memory on `ranks` for micro-batches of more than 30 tokens."""
    return [str(ROOT / "tests/support/runs/starved_train.py"), "30", ranks, *arguments]


def test_a_rank_without_memory_makes_all_ranks_take_smaller_micro_batches(tmp_path: Path, cache: str):
    more = ("trainer.max_steps=3", "trainer.validate_at_start=false", "observe.progress=plain")
    enough, scarce = (
        words(tmp_path / name, *more, f"trainer.tokens_per_micro_batch={tokens}")
        for name, tokens in (("enough", 24), ("scarce", 48))
    )
    done = forked(2, *enough, HWGRPO_CACHE=cache)
    assert done.returncode == 0, done.stderr[-3000:]
    done = forked(2, *starved("1", *scarce[2:]), HWGRPO_CACHE=cache)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "with 48 tokens per micro-batch: repeated with 24, and so from here on" in done.stdout
    assert runs.metrics(tmp_path / "scarce") == runs.metrics(tmp_path / "enough")


@pytest.mark.slow
def test_where_ranks_meet_within_a_pass_the_run_ends_and_starts_again_with_what_it_found(tmp_path: Path, cache: str):
    """Another rank waits within its pass and cannot be notified, but torchrun ends it."""
    more = ("trainer.strategy=fsdp2", "trainer.max_steps=2", "trainer.validate_at_start=false", "rollout.probe_every=0")
    command = starved("1", *words(tmp_path / "run", *more, "trainer.tokens_per_micro_batch=48")[2:])
    done = torchrun(2, *command, HWGRPO_CACHE=cache)
    assert done.returncode != 0
    assert "hwgrpo: error: out of memory while updating the policy" in done.stderr
    assert "Started again, the run uses 24 tokens per micro-batch" in done.stderr
    done = forked(2, *command, HWGRPO_CACHE=cache)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(runs.metrics(tmp_path / "run")) == 3
