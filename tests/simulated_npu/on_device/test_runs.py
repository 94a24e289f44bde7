"""Whole small runs on the device: resumed, in bf16, without memory, and with mistakes planted that a CPU hides."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch_npu
from hwgrpo_backends import Backend
from hwgrpo_backends.cpu import BACKEND as CPU
from hwgrpo_backends.device import Device
from hwgrpo_backends.npu import BACKEND as NPU
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hwgrpo.catalog import LAYOUTS
from hwgrpo.errors import CheckpointError, RunError
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.report.resume_rows import resume_rows
from hwgrpo.report.run_data import read_run
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.policy.micro_batch import MicroBatch
from hwgrpo.training.strategies import held_adamw, host_gradients
from hwgrpo.training.strategies.held_adamw import gradient_of
from hwgrpo.training.strategies.host_gradients import HostGradients
from hwgrpo.training.strategies.optimizer import build_optimizer
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.policy_update import PolicyUpdate
from tests.support.models.tiny import ragged_batch, settings, tiny_qwen3
from tests.support.numbers.rounding import GENTLE, LOGITS, STEP, assert_metrics_close, drift
from tests.support.runs import runs
from tests.support.runs.saving import policy_of
from tests.support.runs.wrong_devices import WRONG

FULL = ("model.dtype=float32", "trainer.save_every=2", "trainer.validate_every=2", "trainer.max_steps=4")
VARIANTS = {
    "full": FULL,
    "lora with dropout and KL": (*FULL, "model.lora.rank=4", "model.lora.dropout=0.1", "algorithm.kl.coef=0.01"),
    "several updates in bf16": (*FULL[1:], "trainer.prompts_per_update=2", "trainer.epochs_per_batch=2"),
    "states on the host in 8 bits": (*FULL, "trainer.offload=optimizer", "optim.name=adamw_8bit"),
}


def saved(output: Path, step: int) -> dict[str, bytes]:
    """Return the tensors of a checkpoint, by file."""
    folder = checkpoint_files.folder_of(output / "checkpoints", step)
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_equals_the_uninterrupted_bitwise(tmp_path: Path, variant: str):
    words = VARIANTS[variant]
    assert runs.run(tmp_path / "whole", *words, backend=NPU) == "completed"
    runs.run(tmp_path / "parts", *words, "trainer.max_steps=2", backend=NPU)
    torch.manual_seed(99)  # nothing may be left over from the first part
    runs.run(tmp_path / "parts", *words, backend=NPU)
    in_background, at_the_end = (saved(tmp_path / folder, 2) for folder in ("whole", "parts"))
    assert in_background == at_the_end
    whole, parts = runs.everything(tmp_path / "whole"), runs.everything(tmp_path / "parts")
    assert [line["step"] for line in whole["metrics"] if "actor/grad_norm" in line] == [1, 2, 3, 4]
    assert parts["metrics"] == whole["metrics"]
    assert parts["weights"] == whole["weights"]


def test_states_and_gradients_in_pinned_host_memory_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_gradients, "CHUNK", 4 * held_adamw.BLOCK)
    plain = (*FULL, "trainer.tokens_per_micro_batch=64")
    held = (*plain, "trainer.offload=gradients")
    strategies: list[Single] = []
    wrap = Single.wrap
    monkeypatch.setattr(Single, "wrap", lambda self, *rest: (strategies.append(self), wrap(self, *rest)))
    for name, words in (("held", held), ("plain", plain)):
        assert runs.run(tmp_path / name, *words, backend=NPU) == "completed"
    assert runs.everything(tmp_path / "held") == runs.everything(tmp_path / "plain")
    on_host, on_device = (
        [value for shard in strategy.owned_shards() for key, value in shard.values.items() if key != "parameter"]
        for strategy in strategies
    )
    assert all(value.is_pinned() for value in on_host)
    assert len({value.untyped_storage().data_ptr() for value in on_host}) < len(on_host) / 2, "in few blocks"
    assert {value.device.type for value in on_device} == {"npu"}


def test_gradients_that_are_summed_on_the_host_are_complete_when_they_are_read():
    parameter = torch.nn.Parameter(torch.ones(8, device="npu"))
    gradients = HostGradients([parameter])
    for _ in range(3):
        (parameter * torch.arange(8.0, device="npu")).sum().backward()
    held = gradients.get(parameter)
    assert held is not None
    assert held.tolist() == [3.0 * each for each in range(8)]


def test_gradients_that_are_summed_on_the_host_are_on_the_device_one_at_a_time():
    device, count, size = Device(NPU), 8, 2**16

    def peak(offload: str) -> int:
        module = torch.nn.ParameterList(torch.ones(4, size // 4) for _ in range(count)).to(device.torch_device)
        optimizer = build_optimizer(module, runs.small(Path("unused")).optim, offload=offload)
        device.reset_peak()
        before = device.memory().allocated or 0
        for _ in range(2):
            torch.stack([parameter.sum() for parameter in module]).sum().backward()
        assert gradient_of(optimizer, module[0]) is not None
        return (device.memory().peak or 0) - before

    assert peak("none") >= 4 * count * size
    assert peak("gradients") <= 4 * 3 * size  # a gradient as it is computed, in one piece, and the sum so far


def test_the_devices_own_dtype_is_bf16_and_learns_nearly_what_fp32_does(tmp_path: Path):
    norms = {}
    for dtype in ("auto", "bfloat16", "float32"):
        runs.run(tmp_path / dtype, f"model.dtype={dtype}", "trainer.max_steps=1", backend=NPU)
        norms[dtype] = [line["actor/grad_norm"] for line in runs.metrics(tmp_path / dtype) if "actor/grad_norm" in line]
    assert norms["auto"] == norms["bfloat16"] != norms["float32"]
    assert norms["bfloat16"] == pytest.approx(norms["float32"], rel=0.02)


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_adapters_on_a_quantized_base_train_as_on_the_cpu(tmp_path: Path, method: str):
    words = ("model.dtype=float32", "model.lora.rank=4", f"model.quantize={method}", "trainer.max_steps=2", *GENTLE)
    for backend in (CPU, NPU):
        assert runs.run(tmp_path / backend.name, *words, backend=backend) == "completed"
    kernels = json.loads((tmp_path / NPU.name / "kernels.json").read_text())["choices"]
    chosen = {each["implementation"] for each in kernels if each["op"] == "dequantize_nf4"}
    assert chosen == ({"torch"} if method == "nf4" else set())
    on_cpu, on_npu = (runs.metrics(tmp_path / backend.name) for backend in (CPU, NPU))
    assert any(line.get("actor/grad_norm", 0) > 0 for line in on_cpu)
    assert_metrics_close(on_npu, on_cpu, drift(len(on_cpu)))


def test_a_quantized_mixture_trains_as_on_the_cpu(tmp_path: Path):
    path, words = tmp_path / "mixture", ("model.dtype=float32", "model.lora.rank=4", "model.quantize=nf4", *GENTLE)
    tokenizer, sizes = character_tokenizer(""), {"hidden_size": 32, "num_hidden_layers": 1, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2))
    for part in (model, tokenizer):
        part.save_pretrained(path)
    for backend in (CPU, NPU):
        own = (f"model.path={path}", "trainer.max_steps=2", "rollout.n=12")
        assert runs.run(tmp_path / backend.name, *words, *own, backend=backend) == "completed"
    on_cpu, on_npu = (runs.metrics(tmp_path / backend.name) for backend in (CPU, NPU))
    assert any(line.get("actor/grad_norm", 0) > 0 for line in on_cpu)
    assert_metrics_close(on_npu, on_cpu, drift(len(on_cpu)))


def a_cuda_call(patch: pytest.MonkeyPatch) -> None:
    plain = Single.clip_gradients

    def planted(self: Single, max_norm: float) -> torch.Tensor:
        torch.cuda.synchronize()
        return plain(self, max_norm)

    patch.setattr(Single, "clip_gradients", planted)


def a_tensor_left_on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    plain = MicroBatch.to

    def planted(self: MicroBatch, device: torch.device) -> MicroBatch:
        moved = plain(self, device)
        return replace(moved, hidden_rows=self.hidden_rows, signals=self.signals)

    patch.setattr(MicroBatch, "to", planted)


MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a call of torch.cuda": (a_cuda_call, "CUDA"),
    "a tensor left on the CPU": (a_tensor_left_on_the_cpu, "device"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    plant, told = MISTAKES[name]
    plant(monkeypatch)
    with pytest.raises(Exception, match=told):
        runs.run(tmp_path / "run", "model.dtype=float32", "trainer.max_steps=1", backend=NPU)


def test_a_device_that_is_too_small_ends_the_run_out_of_memory(tmp_path: Path):
    _, total = torch.npu.mem_get_info()
    torch_npu._device.set_capacity(torch.npu.memory_allocated() + 2**16)
    try:
        with pytest.raises(RunError, match="NPU out of memory") as caught:
            runs.run(tmp_path / "run", "trainer.max_steps=1", backend=NPU)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        told = str(caught.value)
        assert re.search(
            r"^out of memory while .*, on npu:0 \(Ascend910B3; .* in total, .* free, .* in this run's", told
        )
        assert "lower " in told
        assert "no checkpoint yet" in told
    finally:
        torch_npu._device.set_capacity(total)


def test_a_checkpoint_of_the_npu_goes_on_on_the_cpu_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ("model.dtype=float32", "trainer.save_every=1", "model.lora.rank=4", "model.lora.dropout=0.1")
    words += ("observe.progress=plain", "trainer.validate_at_start=false")
    for steps, backend, note in ((1, NPU, ""), (2, CPU, "is of npu, not of cpu"), (3, NPU, "is of cpu, not of npu")):
        runs.run(tmp_path / "run", *words, f"trainer.max_steps={steps}", backend=backend)
        told = capsys.readouterr().out
        assert ("random state" in told) == bool(note)
        assert note in told


MOVED = ("model.dtype=float32", "rollout.temperature=0.7", "trainer.save_every=2", "trainer.validate_every=2", *GENTLE)


def move(output: Path, steps: int, backend: Backend, *overrides: str) -> None:
    assert runs.run(output, *MOVED, f"trainer.max_steps={steps}", *overrides, backend=backend) == "completed"


def test_a_run_moved_to_the_npu_and_back_has_the_curve_of_one_that_stayed(tmp_path: Path):
    move(tmp_path / "stayed", 6, CPU)
    for steps, backend in ((2, CPU), (4, NPU), (6, CPU)):
        move(tmp_path / "moved", steps, backend)
    moved, stayed = (runs.metrics(tmp_path / name) for name in ("moved", "stayed"))
    assert min(line["actor/grad_norm"] for line in stayed if "actor/grad_norm" in line) > 0, "nothing was learned"
    assert_metrics_close(moved, stayed, drift(6))
    record = read_run(tmp_path / "moved")
    assert [each["step"] for each in record.resumes] == [2, 4]
    assert [(each["from"]["backend"], each["to"]["backend"]) for each in record.resumes] == [
        ("cpu", "npu"),
        ("npu", "cpu"),
    ]
    for each in record.resumes:
        assert each["passed"]
        for stage in each["stages"]:
            assert stage["error"] <= STEP * max(1.0, abs(stage["expected"]))
            assert stage["tolerance"] <= STEP * LOGITS, "more than rounding passes"
    rows = resume_rows(record.resumes)
    assert [(row["from"][:5], row["to"][:5], row["mood"]) for row in rows] == [
        ("cpu (", "npu (", "good"),
        ("npu (", "cpu (", "good"),
    ]


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_npu_on_the_way_is_named(tmp_path: Path, mistake: str, monkeypatch: pytest.MonkeyPatch):
    move(tmp_path / "run", 2, CPU)
    WRONG[mistake](monkeypatch, "npu")
    named = r"npu \(Ascend910B3, float32, .* computes other log-probs than cpu \(.*backend cpu -> npu"
    with pytest.raises(CheckpointError, match=named):
        move(tmp_path / "run", 4, NPU)
    move(tmp_path / "run", 4, CPU)
    assert [each["to"]["backend"] for each in read_run(tmp_path / "run").resumes] == ["cpu"]


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        arrives = isinstance(result, torch.Tensor) and result.device.type == "cpu"
        if any(each.device.type == "npu" for each in tensors) and (arrives or not isinstance(result, torch.Tensor)):
            self.count += func.overloadpacket.__name__ in ("_to_copy", "_local_scalar_dense", "copy_", "item")
        return result


@pytest.mark.parametrize("layout", ["padded", "grouped", "packed"])
def test_the_host_reads_no_more_of_many_passes_than_of_one(layout: str):
    here = torch.device("npu")

    def reads(tokens: int) -> tuple[int, int, int]:
        config = settings("model.dtype=float32", f"trainer.tokens_per_micro_batch={tokens}")
        policy = policy_of(tiny_qwen3()).to(here)
        strategy = Single(here, "hccl")
        strategy.wrap(policy, config)
        update = PolicyUpdate(config, strategy, policy, here, LAYOUTS.load(layout), total_updates=9)
        batch = ragged_batch(prompts=16, n=2)
        passes = len(update._micro_batches(batch, range(len(batch))))
        with HostReads() as scoring:
            update.score(batch)
        with HostReads() as updating:
            update.accumulate_gradients(batch, range(len(batch)), torch.zeros(len(batch.tokens)))
        return passes, scoring.count, updating.count

    few, many = reads(10_000), reads(32)
    assert few[0] == 1
    assert many[0] >= 4
    # transformers looks for packed sequences in positions where there is no mask, which the host reads
    of_transformers = many[0] - few[0] if layout == "padded" else 0
    assert [of_many - of_few for of_few, of_many in zip(few[1:], many[1:], strict=True)] == [of_transformers] * 2
