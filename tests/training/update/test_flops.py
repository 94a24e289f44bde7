"""Model FLOPs by formula against what torch counts while it computes, and the share of the peak in a run's metrics."""

import copy

import pytest
import torch
from hwgrpo_backends.device import Device
from hwgrpo_backends.peaks import Peak
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hwgrpo.models.experts import set_experts_forward
from hwgrpo.models.quantization import quantize
from hwgrpo.models.router import EXPERTS
from hwgrpo.models.tower_work import tower_work
from hwgrpo.models.vision import freeze_vision
from hwgrpo.support.jsonlines import read_lines
from hwgrpo.training.policy.layouts import GROUPED, PADDED
from hwgrpo.training.stages import observe
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.flops import training_work
from hwgrpo.training.update.step_metrics import utilisation
from tests.support.models.exact_kl import LORA, exact_update
from tests.support.models.image_sequences import Sequences
from tests.support.models.steps import CPU, gradients, updater
from tests.support.models.tiny import ragged_batch, tiny_llama, tiny_qwen3
from tests.support.models.vision_families import model_of
from tests.support.runs.runs import run


def one_by_one(update):
    """Make each sequence a micro-batch of its own: nothing is padded."""
    update.config.trainer.tokens_per_micro_batch = 1
    return update


def adapted(model, targets="all-linear"):
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))


def experts():
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=37, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
        )
    )  # fmt: skip
    set_experts_forward(model)
    return model


def scores_beyond_causal(update, batch):
    """FLOPs of the scores that eager attention computes and throws away, in rows of one sequence each."""
    text = update.policy.base.config
    lengths = [int(n) for n in (batch.prompt_offsets.diff()[batch.prompt_index] + (batch.lengths - 1).clamp_min(0))]
    thrown_away = sum(n * n - n * (n + 1) // 2 for n in lengths)
    return 12 * text.num_attention_heads * text.head_dim * text.num_hidden_layers * thrown_away


MODELS = {"tied": tiny_qwen3, "untied": lambda: tiny_qwen3(tied=False), "llama": tiny_llama}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_full_pass_needs_what_torch_counts(make):
    model = make()
    model.set_attn_implementation("eager")
    batch = ragged_batch()
    update = one_by_one(updater(model))
    with FlopCounterMode(display=False) as counter:
        gradients(update, batch)
    # what is left over are the products that make rotary angles
    assert update.flops == pytest.approx(counter.get_total_flops() - scores_beyond_causal(update, batch), rel=0.01)


@pytest.mark.parametrize("words", [(), LORA], ids=["copy", "adapters"])
def test_with_an_exact_kl_a_pass_is_also_a_forward_of_the_reference(words):
    def make():
        model = tiny_qwen3()
        model.set_attn_implementation("eager")
        return model

    batch, update = ragged_batch(), one_by_one(exact_update(Single(CPU, "gloo"), make, words))
    with FlopCounterMode(display=False) as counter:
        gradients(update, batch)
    counted = counter.get_total_flops() - scores_beyond_causal(update, batch) * 4 / 3
    assert update.flops == pytest.approx(counted, rel=0.06 if words else 0.01)


def test_frozen_weights_under_adapters_cost_four_per_parameter():
    model = adapted(tiny_qwen3())
    model.set_attn_implementation("eager")
    batch = ragged_batch()
    update = one_by_one(updater(model))
    with FlopCounterMode(display=False) as counter:
        gradients(update, batch)
    counted = counter.get_total_flops() - scores_beyond_causal(update, batch)
    # in the first layer nothing before the adapters needs a gradient, which the formula does not know of
    assert update.flops == pytest.approx(counted, rel=0.06)
    work, full = training_work(update.policy), training_work(updater(tiny_qwen3()).policy)
    frozen = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "lora" not in n and "embed" not in n)
    added = sum(p.numel() for n, p in model.named_parameters() if "lora" in n)
    assert full.per_token == 6 * frozen
    assert work.per_token == 4 * frozen + 6 * added
    assert work.per_response_token / full.per_response_token == 4 / 6


@pytest.mark.parametrize("make", [tiny_qwen3, experts])
@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_quantized_weights_cost_what_frozen_ones_do(make, method):
    plain, codes = make(), make()
    quantize(codes, method)
    targets = ["q_proj"] if make is experts else "all-linear"  # peft cannot size adapters of experts by their codes
    found, expected = (training_work(updater(adapted(model, targets)).policy) for model in (codes, plain))
    assert found == expected


def test_a_token_meets_only_the_experts_it_is_sent_to():
    model = experts()
    dense = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "head" not in n)
    routed = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 3)
    assert routed == 2 * 4 * 3 * 32 * 16
    assert training_work(updater(model).policy).per_token == 6 * (dense + routed / 2)
    policy = updater(model).policy
    for name in EXPERTS:
        setattr(model.config, name, 0)
    assert training_work(policy) is None, "a share that is not known is not made up"


def test_a_prompt_computed_once_and_padding_count_once_and_not_at_all():
    batch = ragged_batch()
    alone, padded = one_by_one(updater(tiny_qwen3())), updater(tiny_qwen3(), layout=PADDED)
    grouped = updater(tiny_qwen3(), layout=GROUPED)
    for update in (alone, padded, grouped):
        gradients(update, batch)
    assert padded.flops == alone.flops
    saved = 2 * batch.prompt_offsets.diff()  # of three responses each, two do without the prompt's tokens
    work = training_work(grouped.policy)
    pairs = (batch.prompt_offsets.diff() * (batch.prompt_offsets.diff() + 1)).sum()  # twice the sum to P
    assert alone.flops - grouped.flops == pytest.approx(
        float(work.per_token * saved.sum() + work.per_pair[0][1] * pairs)
    )


def test_a_step_counts_its_own_updates_and_no_earlier_ones():
    batch = ragged_batch()
    once, twice = updater(tiny_qwen3()), updater(tiny_qwen3(), "trainer.epochs_per_batch=2")
    once(batch)
    first = once.flops
    once(batch)
    twice(batch)
    assert first > 0
    assert once.flops == first
    assert twice.flops == 2 * first


def test_a_sliding_window_bounds_what_a_token_sees():
    model = tiny_qwen3()
    policy = updater(model).policy
    model.config.layer_types = ["full_attention", "sliding_attention"]
    model.config.sliding_window = 3
    per_layer = 12 * 4 * 8
    assert training_work(policy).per_pair == ((None, per_layer), (3, per_layer))


@pytest.mark.parametrize("trained", ["projector", "all"])
@pytest.mark.parametrize("layout", [None, PADDED, GROUPED], ids=["one by one", "padded", "grouped"])
def test_a_trained_tower_counts_in_each_pass_once_per_prompt_and_a_frozen_one_does_not(layout, trained):
    batch = Sequences("Qwen2-VL", observes=True, prompts=(0, 1)).batch()  # text alone encodes noise, which is no work
    flops, counted = {}, {}
    for part in ("none", trained):
        model = copy.deepcopy(model_of("Qwen2-VL"))
        model.set_attn_implementation("eager")
        freeze_vision(model, part)
        update = one_by_one(updater(model)) if layout is None else updater(model, layout=layout)
        encoder = update.policy.images
        with FlopCounterMode(display=False) as counter:
            gradients(update, batch)
        flops[part], counted[part] = update.flops, counter.get_total_flops()
    # three and two responses to prompts with images, of which one observes another
    assert encoder.encoded == (6 if layout is None else 3)
    every = {each.digest: each.tokens for each in (*batch.images, *sum(batch.seen, ())) if each is not None}
    frozen = sum(map(tower_work(model, backward=False).of, every.values()))
    assert flops[trained] - flops["none"] == counted[trained] - (counted["none"] - frozen)


def test_the_share_is_of_all_ranks_peaks():
    assert utilisation(4e12, 2.0, 1e12, 4) == {"perf/mfu/actor": pytest.approx(0.5)}
    assert utilisation(4e12, 2.0, None, 4) == {}
    assert utilisation(0.0, 2.0, 1e12, 4) == {}


def steps(output):
    return [line for line in read_lines(output / "metrics.jsonl") if "timing_s/update_actor" in line]


def test_a_run_reports_its_share_of_a_known_peak_and_none_of_an_unknown_one(tmp_path, monkeypatch):
    words = ("trainer.max_steps=1", "trainer.validate_at_start=false", "data.validation=null")
    run(tmp_path / "unknown", *words)
    (line,) = steps(tmp_path / "unknown")
    assert "perf/mfu/actor" not in line
    monkeypatch.setattr(Device, "peak", lambda self, dtype: Peak(1e12, None, "made up"))
    done = []
    monkeypatch.setattr(observe, "utilisation", lambda flops, *rest: done.append(flops) or utilisation(flops, *rest))
    run(tmp_path / "known", *words)
    assert done[-1] > 0
    (line,) = steps(tmp_path / "known")
    assert line["perf/mfu/actor"] * line["timing_s/update_actor"] * 1e12 == pytest.approx(done[-1])
