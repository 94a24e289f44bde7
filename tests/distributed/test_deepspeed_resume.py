"""A run under ZeRO-3 goes on from its checkpoint as if nothing had happened, under another strategy too, and back."""

from pathlib import Path
from typing import Any

import pytest

from hwgrpo.config.load import to_yaml
from tests.support.numbers.rounding import GENTLE, assert_metrics_close, drift
from tests.support.processes.deepspeed_package import with_deepspeed
from tests.support.runs import runs

ZERO_3 = ("trainer.strategy=deepspeed", "trainer.deepspeed.stage=3")
FSDP2 = ("trainer.strategy=fsdp2",)
MORE = (
    "trainer.max_steps=4",
    "trainer.save_every=2",
    "algorithm.kl.coef=0.05",
    "trainer.prompts_per_update=2",
    *GENTLE,
)
pytestmark = pytest.mark.slow


def trained(output: Path, *words: str) -> list[dict[str, Any]]:
    """Return the metrics of a run on two processes."""
    recipe = output.with_suffix(".yaml")
    recipe.write_text(to_yaml(runs.small(output, *MORE, *words)))
    done = with_deepspeed(2, "-m", "hwgrpo", "train", str(recipe))
    assert done.returncode == 0, done.stderr[-3000:]
    return runs.metrics(output)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWGRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory, cache: None) -> tuple[Path, list[dict[str, Any]]]:
    """A run of four steps under ZeRO-3: its checkpoint after two, and its metrics."""
    output = tmp_path_factory.mktemp("zero") / "run"
    return output / "checkpoints" / "step-00000002", trained(output, *ZERO_3)


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory, cache: None) -> tuple[Path, list[dict[str, Any]]]:
    """The same under FSDP2."""
    output = tmp_path_factory.mktemp("fsdp2") / "run"
    return output / "checkpoints" / "step-00000002", trained(output, *FSDP2)


def assert_goes_on(resumed: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """Compare the steps after the checkpoint."""
    later = [line for line in whole if line["step"] > 2]
    assert [line["step"] for line in resumed] == [line["step"] for line in later] != []
    assert_metrics_close(resumed, later, drift(4))  # two updates of each of two steps


def test_zero_3_goes_on_bit_for_bit(zero: tuple[Path, list[dict[str, Any]]], tmp_path: Path):
    checkpoint, whole = zero
    resumed = trained(tmp_path / "run", *ZERO_3, f"trainer.resume={checkpoint}")
    assert resumed == [line for line in whole if line["step"] > 2] != []
    finals = [sorted((folder / "final").glob("*.safetensors")) for folder in (tmp_path / "run", checkpoint.parents[1])]
    assert [path.read_bytes() for path in finals[0]] == [path.read_bytes() for path in finals[1]] != []


def test_what_zero_3_saved_goes_on_under_fsdp2(zero: tuple[Path, list[dict[str, Any]]], tmp_path: Path):
    checkpoint, whole = zero
    assert_goes_on(trained(tmp_path / "run", *FSDP2, f"trainer.resume={checkpoint}"), whole)


def test_what_zero_3_saved_goes_on_in_one_process(zero: tuple[Path, list[dict[str, Any]]], tmp_path: Path):
    checkpoint, whole = zero
    assert runs.forked(lambda: runs.run(tmp_path / "run", *MORE, f"trainer.resume={checkpoint}")) == 0
    assert_goes_on(runs.metrics(tmp_path / "run"), whole)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_fsdp2_saved_goes_on_under_zero(stage: int, fsdp2: tuple[Path, list[dict[str, Any]]], tmp_path: Path):
    checkpoint, whole = fsdp2
    words = ("trainer.strategy=deepspeed", f"trainer.deepspeed.stage={stage}", f"trainer.resume={checkpoint}")
    assert_goes_on(trained(tmp_path / "run", *words), whole)


@pytest.mark.parametrize(("stage", "adapters"), [(2, ()), (1, ("model.lora.rank=2", "model.lora.dropout=0"))])
def test_a_reference_that_follows_the_policy_goes_on(stage: int, adapters: tuple[str, ...], tmp_path: Path):
    moved = (*adapters, "algorithm.kl.sync_every=2")
    zero = (*moved, "trainer.strategy=deepspeed", f"trainer.deepspeed.stage={stage}")
    whole, fixed = trained(tmp_path / "whole", *zero), trained(tmp_path / "fixed", *zero, "algorithm.kl.sync_every=0")
    losses = [[line["actor/kl_loss"] for line in each if "actor/kl_loss" in line] for each in (whole, fixed)]
    assert losses[0][:2] == losses[1][:2]
    assert losses[0][2] < 0.5 * losses[1][2], "moved after step 2"
    checkpoint = f"trainer.resume={tmp_path}/whole/checkpoints/step-00000002"
    assert trained(tmp_path / "parts", *zero, checkpoint) == [line for line in whole if line["step"] > 2]
    assert_goes_on(trained(tmp_path / "other", *moved, *FSDP2, checkpoint), whole)
