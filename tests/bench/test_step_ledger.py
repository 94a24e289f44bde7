"""The ledger: exact counts where they can be derived by hand, and those of the project's step, which only fall."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hwgrpo_backends.cuda import BACKEND
from hwgrpo_backends.peaks import NVIDIA
from hwgrpo_kernels import kernel_launches
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config

from hwgrpo.bench.ledger import ledger_step
from hwgrpo.bench.ledger.kernel_costs import CHUNK, Rates, launches_over_lists
from hwgrpo.bench.ledger.kernel_ledger import KernelLedger, Stage
from hwgrpo.bench.ledger.ledger_step import LedgerStep, count_step
from hwgrpo.cli.main import main
from hwgrpo.config import Config, load_config
from hwgrpo.models.meta_device import META
from hwgrpo.rollout.local.shared_prefix_attention import SharedPromptCache

PINNED = {
    "decode step: a layer": 8,
    "decode step: beside layers": 3,
    "decode step: a layer with LoRA": 19,
    "sampler": 2,
    "reference: a layer": 30,
    "update forward: a layer": 40,
    "update backward: a layer": 61,
    "host waits of an update, and per micro-batch": (4, 0),
}
"""Kernels of the project's step today. A change that lowers a figure edits its line."""

UPDATE = ("update forward", "LM head and loss", "update backward", "update, rest", "gradient clipping", "optimizer")
SIZES = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SETTINGS = (
    *("trainer.prompts_per_step=4", "rollout.n=8", "data.max_prompt_tokens=90", "rollout.max_response_tokens=16"),
    "algorithm.kl.coef=0.1",
)
RATES = Rates.of(next(chip for chip in NVIDIA if chip.title == "H100 SXM"))


def make_model(folder: Path, layers: int) -> str:
    """Write the configuration of a model without weights; return its folder."""
    config = Qwen2Config(num_hidden_layers=layers, architectures=["Qwen2ForCausalLM"], **SIZES)
    config.save_pretrained(folder / str(layers))
    return str(folder / str(layers))


def settings(folder: Path, layers: int, *overrides: str) -> Config:
    model = f"model.path={make_model(folder, layers)}"
    return load_config("tiny_sort", [*SETTINGS, model, *overrides], data_may_be_missing=True)


def count(folder: Path, layers: int, *overrides: str) -> dict[str, Stage]:
    return count_step(settings(folder, layers, *overrides), KernelLedger(RATES), BACKEND)


def per_layer(one: dict[str, Stage], two: dict[str, Stage], stage: str) -> Counter[str]:
    """Return the kernels per run that the second of two layers adds."""
    more = Counter(two[stage].kernels)
    more.subtract(one[stage].kernels)
    return Counter({name: number // two[stage].runs for name, number in more.items() if number})


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Stage], dict[str, Stage]]:
    """Return the steps of models with one layer and with two."""
    folder = tmp_path_factory.mktemp("ledger")
    return count(folder, 1), count(folder, 2)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stage]:
    """Return the step of a model with one layer, in a micro-batch per prompt."""
    return count(tmp_path_factory.mktemp("split"), 1, "trainer.tokens_per_micro_batch=300")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stage]:
    """Return the step of a layer with adapters, without device graphs, and with gradient checkpointing."""
    options = ("model.lora.rank=4", "algorithm.kl.coef=0", "rollout.graphs=false", "model.gradient_checkpointing=true")
    return count(tmp_path_factory.mktemp("adapted"), 1, *options)


@pytest.fixture
def ledger() -> Iterator[KernelLedger]:
    found = KernelLedger(RATES)
    with found.counting(BACKEND):
        yield found


def empty(*size: int, dtype: torch.dtype = torch.bfloat16, trained: bool = False) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device=META, requires_grad=trained)


def test_a_linear_layer_is_one_product_forward_and_two_backward(ledger):
    x, weight = empty(256, 64, trained=True), empty(128, 64, trained=True)
    with ledger.stage("forward") as forward:
        y = F.linear(x, weight)
    with ledger.stage("backward") as backward:
        y.backward(torch.empty_like(y))
    assert forward.kernels == {"mm": 1}
    assert backward.kernels == {"mm": 2}
    product = 2 * 256 * 64 * 128
    traffic = 2 * (256 * 64 + 64 * 128 + 256 * 128)
    assert (forward.total.flops, forward.total.bytes) == (product, traffic)
    assert (backward.total.flops, backward.total.bytes) == (2 * product, 2 * traffic)
    assert forward.total.seconds == RATES.least_seconds, "a small kernel takes the least time"


def test_large_kernels_take_the_time_of_their_bytes_or_their_flops(ledger):
    x, weight = empty(8192, 8192), empty(8192, 8192)
    with ledger.stage("product") as product:
        F.linear(x, weight)
    with ledger.stage("sum") as total:
        torch.add(x, weight)
    assert product.total.seconds == pytest.approx(2 * 8192**3 / 756e12)
    assert total.total.seconds == pytest.approx(3 * 2 * 8192**2 / 2.94e12)


@pytest.mark.parametrize("add", [torch.addmm, torch.Tensor.addmm_])
def test_a_product_added_to_a_sum_has_its_flops_in_place_and_not(ledger, add):
    total, x, weight = empty(16, 32), empty(16, 64), empty(64, 32)
    with ledger.stage("sum") as stage:
        add(total, x, weight)
    assert (stage.total.kernels, stage.total.flops) == (1, 2 * 16 * 64 * 32)


def test_a_linear_layer_with_fp32_masters_casts_its_operands_and_gradients(ledger):
    x, weight = empty(256, 64, dtype=torch.float32, trained=True), empty(128, 64, dtype=torch.float32, trained=True)
    with ledger.stage("forward") as forward, torch.autocast("cuda", torch.bfloat16):
        y = F.linear(x, weight)
    with ledger.stage("backward") as backward:
        y.backward(torch.empty_like(y))
    assert y.dtype == torch.bfloat16
    assert forward.kernels == {"mm": 1, "_to_copy": 2}
    assert backward.kernels == {"mm": 2, "_to_copy": 2}


def test_the_fused_step_of_adamw_is_one_kernel_of_seven_passes_and_that_over_lists_eight(ledger):
    elements = 3 * 5000
    found = {}
    for fused in (False, True):
        parameters = [torch.nn.Parameter(empty(5000, dtype=torch.float32)) for _ in range(3)]
        optimizer = torch.optim.AdamW(parameters, fused=fused or None)
        for _ in range(2):  # the first makes the states
            for each in parameters:
                each.grad = torch.empty_like(each)
            with ledger.stage(f"fused {fused}") as found[fused]:
                ledger.stages[f"fused {fused}"].classes.clear()
                optimizer.step()
    assert found[True].kernels["_fused_adamw_"] == 1
    work = found[True].classes["_fused_adamw_"]
    assert work.bytes == 4 * 7 * elements + 4 * 3, "p, m, v read and written, g read; and three counters of steps"
    names = ("mul_", "lerp_", "mul_", "addcmul_", "sqrt", "div_", "add_", "addcdiv_")
    assert found[False].kernels == Counter(f"_foreach_{name}" for name in names)


def test_kernels_over_lists_are_split_by_tensors_and_by_blocks():
    def launches(*sizes: int, depth: int = 1) -> int:
        tensors = [empty(size) for size in sizes]
        return launches_over_lists([tensors] * depth)

    assert launches(*[1] * 110) == 1
    assert launches(*[1] * 111) == 2
    assert launches(*[1] * 37, depth=4) == 2, "36 tensors of four lists fit"
    assert launches(320 * CHUNK) == 1
    assert launches(320 * CHUNK + 1) == 2
    assert launches(319 * CHUNK, 2 * CHUNK) == 2
    assert launches(0, 1) == 1
    assert launches(0) == 0


def test_views_empty_tensors_and_results_without_elements_are_no_kernels(ledger):
    x = empty(4, 8)
    with ledger.stage("none") as stage:
        x.view(8, 4).t()[1:].unsqueeze(0)
        torch.empty_like(x)
        x[:, 8:] = 0.0
        x[:0].clone()
    assert stage.kernels == {"scalar_tensor": 1}, "torch makes a tensor of the number first"


def test_what_an_operation_does_not_touch_is_not_in_its_bytes(ledger):
    table, rows = empty(1000, 8), torch.empty(4, dtype=torch.int64, device=META)
    row, source = torch.empty(1, dtype=torch.int64, device=META), empty(1, 8)
    with ledger.stage("lookup") as lookup:
        F.embedding(rows, table)
    with ledger.stage("write") as write:
        table.index_copy_(0, row, source)
    with ledger.stage("fill") as fill:
        table.zero_()
    with ledger.stage("expanded") as expanded:
        source.expand(1000, 8).clone()
    assert lookup.total.bytes == 4 * 8 + 2 * (4 * 8 * 2), "the indices, and four rows read and written"
    assert write.total.bytes == 8 + 2 * (8 * 2), "the index, and a row read and written"
    assert fill.total.bytes == 1000 * 8 * 2
    assert expanded.total.bytes == (1 + 1000) * 8 * 2


def test_attention_is_one_kernel_forward_and_the_causal_one_half_of_the_flops(ledger):
    query = empty(2, 4, 64, 16, trained=True)
    with ledger.stage("causal") as causal:
        output = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    with ledger.stage("masked") as masked:
        F.scaled_dot_product_attention(query, query, query, attn_mask=empty(1, 1, 64, 64))
    with ledger.stage("padded") as padded:
        F.scaled_dot_product_attention(query, query[..., :60, :], query[..., :60, :], attn_mask=empty(1, 1, 64, 60))
    with ledger.stage("backward") as backward:
        output.backward(torch.empty_like(output))
    scores = 2 * (2 * 4 * 64 * 64 * 16)
    assert (masked.total.flops, causal.total.flops) == (2 * scores, scores), "scores, and weighted values"
    assert masked.kernels == {"_scaled_dot_product_efficient_attention": 1}
    assert causal.kernels == {"_scaled_dot_product_flash_attention": 1}
    assert padded.kernels["constant_pad_nd"] == 2, "60 columns of a mask are padded to 64"
    assert backward.kernels["_scaled_dot_product_flash_attention_backward"] == 3


def test_a_read_by_the_host_is_a_wait_and_a_copy_to_the_device_is_none(ledger):
    with ledger.stage("reads") as stage:
        there = torch.arange(3).to(torch.device("cuda", 0))
        assert there.device.type == "cuda"
        assert there.tolist() == [0, 1, 2], "what came from the host is known there"
        assert float((there + 1).sum()) == 0.0, "nothing else is"
        assert (stage.waits, stage.uploads) == (2, 1)
        buffer = torch.empty(3, dtype=torch.int64).pin_memory()
        there.to("cpu", non_blocking=True)
        buffer.copy_(there, non_blocking=True)
        assert (stage.waits, stage.uploads) == (2, 1), "who does not wait is not counted"
        buffer.copy_(there)
        there.copy_(buffer)
    assert (stage.waits, stage.uploads) == (3, 2)
    assert stage.kernels == {"add": 1, "sum": 1}


def test_products_of_autocast_are_those_of_torch_s_own_on_a_cpu():
    config = Qwen2Config(num_hidden_layers=1, **SIZES)

    class Operations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view and not func.overloadpacket.__name__.startswith(("empty", "_unsafe", "new_empty")):
                self.names[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    ids, mask = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 1, 8, 8)  # without one transformers makes one

    def passes(model: Any, device: str) -> None:
        with torch.autocast(device, torch.bfloat16):
            hidden = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).last_hidden_state
        hidden.backward(torch.ones_like(hidden))

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").model
    with Operations() as operations:
        passes(model, "cpu")
    found = KernelLedger(RATES)
    with META:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").model
    with found.counting(BACKEND), found.stage("passes") as stage:
        passes(model, "cuda")
    several = {"embedding_dense_backward", "constant_pad_nd", "slice_backward"}
    assert {name: number for name, number in stage.kernels.items() if name not in several} == {
        name: number for name, number in operations.names.items() if name not in several
    }


def test_a_decode_layer_launches_what_its_code_says(steps):
    one, two = steps
    assert per_layer(one, two, ledger_step.GRAPH) == {
        "_fused_rms_norm": 2,
        "addmm": 1,  # queries, keys and values, with their biases
        "decode_attention_kernel": 1,
        "addmm_": 2,  # the output and down projections, with the residual
        "mm": 1,  # gate and up
        "swiglu_kernel": 1,
    }


def test_attention_of_a_decode_step_reads_what_is_filled_and_a_prompt_once(steps):
    one, two = steps
    rows, prompts, width, capacity = 32, 4, 90, 16
    heads, kv_heads, size, itemsize = 4, 2, 16, 2
    filled = capacity // 2
    cached = 2 * kv_heads * size * itemsize * (prompts * width + rows * (filled - 1))
    # queries and outputs; keys and values, read and stored; angles; four numbers per row
    beside = rows * size * itemsize * (2 * heads + 4 * kv_heads + 2) + 4 * rows * 8
    work = [step[ledger_step.GRAPH].classes["decode_attention_kernel"] for step in steps]
    assert work[1].kernels - work[0].kernels == two[ledger_step.GRAPH].runs == one[ledger_step.GRAPH].runs
    assert (work[1].bytes - work[0].bytes) // two[ledger_step.GRAPH].runs == cached + beside
    assert (work[1].flops - work[0].flops) // two[ledger_step.GRAPH].runs == 4 * rows * heads * size * (width + filled)


def test_one_more_kernel_in_a_decode_layer_changes_the_count(steps, tmp_path, monkeypatch):
    attend = SharedPromptCache.attend_in_kernel
    monkeypatch.setattr(SharedPromptCache, "attend_in_kernel", lambda *args: attend(*args).clone())
    ledger = KernelLedger(RATES)
    with ledger.counting(BACKEND) as device:
        LedgerStep(settings(tmp_path, 2), ledger, device, BACKEND).generate()
    changed, before = ledger.stages[ledger_step.GRAPH], steps[1][ledger_step.GRAPH]
    assert changed.runs == before.runs == 15
    assert changed.kernels - before.kernels == {"clone": 2 * 15}


def test_the_kernels_of_a_step_are_the_pinned_ones(steps, split, adapted):
    one, two = steps
    assert ledger_step.GRAPH not in adapted
    graph, eager, drawn = two[ledger_step.GRAPH], adapted[ledger_step.EAGER], two[ledger_step.SAMPLER]
    layer = per_layer(one, two, ledger_step.GRAPH).total()
    beside = graph.total.kernels // graph.runs - 2 * layer
    more = split[ledger_step.FORWARD].runs - one[ledger_step.FORWARD].runs
    assert more == 3, "a micro-batch per prompt in place of one"
    waits = [sum(step[name].waits for name in UPDATE) for step in (one, split)]
    each = (waits[1] - waits[0]) // more
    assert {
        "decode step: a layer": layer,
        "decode step: beside layers": beside,
        "decode step: a layer with LoRA": eager.total.kernels // eager.runs - beside,
        "sampler": drawn.total.kernels // drawn.runs,
        "reference: a layer": per_layer(one, two, ledger_step.REFERENCE).total(),
        "update forward: a layer": per_layer(one, two, ledger_step.FORWARD).total(),
        "update backward: a layer": per_layer(one, two, ledger_step.BACKWARD).total(),
        "host waits of an update, and per micro-batch": (waits[0] - each, each),
    } == PINNED


def test_triton_kernels_are_counted_by_their_launches(steps, tmp_path):
    forward, backward = steps[0][ledger_step.FORWARD], steps[0][ledger_step.BACKWARD]
    plain = count(tmp_path, 1, "model.fused_modules=[none]", "algorithm.kl.coef=0")[ledger_step.FORWARD]
    assert not [name for name in plain.kernels if name.endswith("_kernel")]

    def triton(stage: Stage) -> dict[str, int]:
        return {name: number for name, number in stage.kernels.items() if name.endswith("_kernel")}

    assert triton(forward) == {"rms_norm_kernel": 3, "rotary_kernel": 2, "swiglu_kernel": 1}
    assert triton(backward) == {"rms_norm_grad_kernel": 3, "rotary_kernel": 2, "swiglu_grad_kernel": 1}
    assert forward.total.kernels < plain.total.kernels
    tokens, sizes = 4 * (90 + 8 * 15), SIZES["intermediate_size"]
    assert forward.classes["swiglu_kernel"].bytes == 3 * 2 * tokens * sizes
    head = steps[0][ledger_step.HEAD]
    assert (head.kernels["row_stats_kernel"], head.kernels["row_grad_kernel"]) == (1, 1)


def test_a_norm_writes_the_compute_dtype_once_and_reads_a_gradient_per_linear_layer(steps):
    one, two = steps
    tokens, hidden = 4 * (90 + 8 * 15), SIZES["hidden_size"]
    more = {
        name: two[stage].classes[name].bytes - one[stage].classes[name].bytes
        for stage, name in (
            (ledger_step.FORWARD, "rms_norm_kernel"),
            (ledger_step.BACKWARD, "rms_norm_grad_kernel"),
        )
    }
    row, vectors = tokens * hidden, 2 * (4 * hidden + 4 * tokens)  # of two norms, the weight and the roots
    assert more["rms_norm_kernel"] == (4 + 2 + 4 + 2 + 4 + 2) * row + vectors, "x, out; x, update, their sum, out"
    parts = 2 * 4 * hidden * min(-(-tokens // 64), 2 * 132)
    gradients = (3 + 2) * 2 * row
    others = (4 + 4 + 4 + 4 + 4 + 2) * row  # x and its gradient; of the sum too, those of it and of the update
    assert more["rms_norm_grad_kernel"] == gradients + others + vectors + parts


def test_a_checkpointed_layer_runs_forward_again_in_the_backward_pass(steps, adapted):
    again = {
        "swiglu_kernel": 1,
        "_flash_attention_forward": 2,
    }  # two parts: of responses to the prompt, and to themselves
    forward, backward = adapted[ledger_step.FORWARD].kernels, adapted[ledger_step.BACKWARD].kernels
    assert {name: backward[name] for name in again} == {name: forward[name] for name in again} == again
    assert not any(steps[0][ledger_step.BACKWARD].kernels[name] for name in again)


def test_a_kernel_may_declare_its_work(ledger, monkeypatch):
    from hwgrpo_kernels import module_triton

    monkeypatch.setattr(kernel_launches, "_declared", {})
    kernel_launches.declare_work("swiglu_kernel", lambda launch: kernel_launches.KernelWork(7, launch["columns"]))
    with ledger.stage("gate") as stage:
        module_triton.swiglu(empty(2, 16), empty(2, 16))
    assert (stage.total.bytes, stage.total.flops) == (7, 32)
    with pytest.raises(AssertionError, match="declared twice"):
        kernel_launches.declare_work("swiglu_kernel", lambda launch: kernel_launches.KernelWork(0))


def test_the_command_prints_the_stages_and_writes_them(tmp_path, capsys):
    file = tmp_path / "ledger.json"
    model = f"model.path={make_model(tmp_path, 1)}"
    assert main(["bench", "step", "--ledger", "--json", str(file), "tiny_sort", *SETTINGS, model]) == 0
    out = capsys.readouterr().out
    assert "modelled ms" in out
    assert "measured" not in out
    document = json.loads(file.read_text())
    assert document["schema"] == "hwgrpo.bench.ledger/1"
    sampler = document["stages"]["sampler"]
    assert (
        sampler["kernels"]
        == PINNED["sampler"] * sampler["runs"]
        == sum(work["kernels"] for work in sampler["classes"].values())
    )
    assert f"{sampler['kernels']:,}" in out


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--ledger", "--losses", "all"], "leave out one of the two"),
        (["--ledger", "trainer.strategy=fsdp2"], "use single"),
        (["--ledger", "--chip", "910B3"], "use e.g. H100 SXM"),
        (["--chip", "H100 SXM"], "leave it out"),
    ],
)
def test_what_a_ledger_cannot_do_is_an_error_with_a_remedy(arguments, remedy, capsys):
    assert main(["bench", "step", *arguments]) == 2
    assert remedy in capsys.readouterr().err


def test_outside_of_a_ledger_torch_is_as_before():
    with KernelLedger(RATES).counting(BACKEND):
        pass
    assert empty(1).device == META
    assert not torch.is_autocast_enabled("cuda")
