"""Adapters on a frozen base model in bf16: every strategy trains as on one in fp32, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hwgrpo.config.load import to_yaml
from hwgrpo.models import builtin
from tests.support.processes.deepspeed_package import with_deepspeed
from tests.support.processes.launch import ROOT, forked
from tests.support.runs import runs

BASES = ("float32", "auto")
WAYS = {
    "ddp": ["trainer.strategy=ddp"],
    "fsdp2": ["trainer.strategy=fsdp2", "trainer.fsdp2.sync_every=micro_batch"],
    "fsdp2-once": ["trainer.strategy=fsdp2", "trainer.fsdp2.sync_every=update", "trainer.tokens_per_micro_batch=64"],
}
ZERO = {f"zero-{n}": ["trainer.strategy=deepspeed", f"trainer.deepspeed.stage={n}"] for n in (2, 3)}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small model that can sort a little, with values that are exact in bf16."""
    source = builtin.resolve("builtin://tiny?task=sort&hidden=32&layers=1&steps=30&batch=32&digits=3")
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def adapters(model: Path, base: str) -> tuple[str, ...]:
    more = (f"model.path={model}", "model.dtype=bfloat16", "model.lora.rank=4", "algorithm.kl.coef=0.1")
    return (*more, f"model.lora.base_dtype={base}", "trainer.max_steps=2", "observe.progress=plain")


def train(folder: Path, model: Path, ways: dict[str, list[str]], launch, bases=BASES) -> str:
    """Train on two ranks in every way, with each base; return what the runs printed."""
    every = []
    for way, words in ways.items():
        for base in bases:
            recipe = folder / f"{way}-{base}.yaml"
            recipe.write_text(to_yaml(runs.small(folder / f"{way}-{base}", *adapters(model, base), *words)))
            every.append([str(recipe)])
    done = launch(2, str(ROOT / "tests/support/runs/train_worker.py"), "gloo", json.dumps(every))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def assert_equal_but_for_the_base(folder: Path, way: str) -> None:
    in_fp32, in_bf16 = (runs.metrics(folder / f"{way}-{base}") for base in BASES)
    assert in_fp32 == in_bf16
    assert any(line.get("actor/grad_norm", 0) > 0 for line in in_fp32)
    for name in ("final", "final-adapter"):
        [file] = (folder / f"{way}-auto" / name).glob("*.safetensors")
        own, expected = load_file(file), load_file(folder / f"{way}-float32" / name / file.name)
        assert own.keys() == expected.keys()
        for key, weight in expected.items():
            assert torch.equal(own[key], weight), (name, key)


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, train(folder, model, WAYS, forked)


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_adapters_on_a_base_in_bf16_as_on_one_in_fp32(trained, way):
    assert_equal_but_for_the_base(trained[0], way)


def test_a_run_prints_the_dtype_of_its_frozen_matrices(trained):
    printed = trained[1]
    for base, dtype in zip(BASES, ("float32", "bfloat16"), strict=True):
        assert printed.count(f"frozen matrices in {dtype}") == len(WAYS), base
    assert "stays in float32" not in printed


QUANTIZED = ("model.quantize=nf4", "model.dtype=float32")


@pytest.fixture(scope="module")
def quantized(model, tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("quantized")
    printed = train(folder, model, {way: [*words, *QUANTIZED] for way, words in WAYS.items()}, forked, ("auto",))
    runs.forked(lambda: runs.run(folder / "alone", *adapters(model, "auto"), *QUANTIZED))
    return folder, printed


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_adapters_on_a_quantized_base_as_one_process_does(quantized, way):
    folder, printed = quantized
    assert printed.count("frozen matrices in nf4") == len(WAYS)
    for alone, both in zip(runs.metrics(folder / "alone")[1:3], runs.metrics(folder / f"{way}-auto")[1:3], strict=True):
        for name in ("critic/rewards/mean", "actor/loss", "actor/grad_norm", "actor/kl_loss"):
            assert both[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-7), name
    for name in ("final", "final-adapter"):
        [file] = (folder / "alone" / name).glob("*.safetensors")
        expected, found = load_file(file), load_file(folder / f"{way}-auto" / name / file.name)
        assert found.keys() == expected.keys()
        for key, weight in expected.items():
            # the same bound as above, of the largest weight of a matrix
            assert (found[key] - weight).abs().max() <= 1e-5 * weight.abs().max(), (name, key)


@pytest.mark.slow
def test_zero_trains_adapters_on_a_base_in_bf16_as_on_one_in_fp32(model, tmp_path):
    train(tmp_path, model, ZERO, with_deepspeed)
    for way in ZERO:
        assert_equal_but_for_the_base(tmp_path, way)
