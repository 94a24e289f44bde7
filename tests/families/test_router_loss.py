"""The load-balancing loss: its value, its gradient within a step, and what it changes about a step."""

import copy

import hwgrpo_backends
import pytest
import torch
import transformers
from hwgrpo_backends.device import Device
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hwgrpo.errors import ConfigError
from hwgrpo.models.router import check_router, check_router_loss, router_loss
from hwgrpo.training.policy.layouts import BRANCHED, PADDED
from hwgrpo.training.shared_setup import load_policy
from tests.support.models.families import EXPERTS, FAMILIES, SHAPE, TOKENIZER, make, reference_of
from tests.support.models.steps import gradients, reference_gradients, updater
from tests.support.models.tiny import ragged_batch, settings, sharpened
from tests.support.numbers.rounding import STEP, assert_gradients_close, gaps

COEF = 0.5
ROUTED = [name for name in FAMILIES if name in ("Mixtral", "Qwen3Moe", "GptOss")]


def test_it_is_that_of_transformers_over_real_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(12, 5, generator=generator) for _ in range(3))
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 2:] = False
    for top_k in (1, 2):
        expected = load_balancing_loss_func(logits, 5, top_k, mask)
        torch.testing.assert_close(router_loss(logits, mask, top_k), expected)
    assert router_loss((torch.zeros(4, 2),), torch.ones(2, 2, dtype=torch.bool), 2) == pytest.approx(2.0)


def balance(reference, batch, sequences) -> torch.Tensor:
    """The loss of some sequences, each fed alone and without its last token."""
    fed = []
    for s in sequences:
        p = int(batch.prompt_index[s])
        prompt = batch.prompt_tokens[batch.prompt_offsets[p] : batch.prompt_offsets[p + 1]]
        response = batch.tokens[batch.offsets[s] : batch.offsets[s + 1]]
        ids = torch.cat([prompt, response])[None, :-1]
        fed.append(reference(input_ids=ids, output_router_logits=True).router_logits)
    layers = tuple(torch.cat(layer) for layer in zip(*fed, strict=True))
    return load_balancing_loss_func(layers, layers[0].shape[-1], reference.config.num_experts_per_tok)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ROUTED)
def test_a_step_has_its_gradient_too(name, checkpointing, tmp_path):
    model = make(name, tmp_path)
    reference = reference_of(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = ragged_batch(prompts=2, n=3, old=True)
    update = updater(model, f"model.router_loss_coef={COEF}")
    loss, ours, sums = gradients(update, batch)
    expected_loss, expected = reference_gradients(reference, update.config, batch)
    double = copy.deepcopy(reference).double()
    aux = balance(double, batch, range(6))
    aux.backward()
    aux = aux.detach()
    assert loss == pytest.approx(expected_loss + COEF * float(aux), rel=STEP, abs=STEP)
    assert sums["router_loss"] / sums["tokens"] == pytest.approx(float(aux), rel=STEP)
    balances = {key: parameter.grad for key, parameter in double.named_parameters() if parameter.grad is not None}
    assert len(balances) > 2
    total = {key: gradient + (COEF * balances[key] if key in balances else 0) for key, gradient in expected.items()}
    assert_gradients_close(ours, total)
    assert max(gaps(ours, expected).values()) > 1e-2, "without the balance it would be another"


def test_over_micro_batches_it_is_their_mean_by_response_tokens(tmp_path):
    model = make("Mixtral", tmp_path)
    double = reference_of(model).double()
    batch = ragged_batch(prompts=4, n=3, old=True)
    update = updater(model, f"model.router_loss_coef={COEF}", "trainer.tokens_per_micro_batch=32")
    parts = update._micro_batches(batch, range(12))
    assert len(parts) > 2
    without, _, _ = gradients(updater(copy.deepcopy(model)), batch)
    loss, _, sums = gradients(update, batch)
    with torch.no_grad():
        each = [
            (sum(int(batch.lengths[s]) for [s] in part), balance(double, batch, [s for [s] in part])) for part in parts
        ]
    expected = sum(tokens * float(aux) for tokens, aux in each) / len(batch.tokens)
    assert sums["router_loss"] / sums["tokens"] == pytest.approx(expected, rel=STEP)
    assert loss == pytest.approx(without + COEF * expected, rel=STEP, abs=STEP)


def test_padding_and_layout_change_it_only_by_the_prompts_that_are_fed_once(tmp_path):
    model = make("Qwen3Moe", tmp_path)
    batch = ragged_batch(prompts=3, n=1, old=True)  # one response per prompt: the same tokens in both layouts
    words = f"model.router_loss_coef={COEF}"
    loss, expected, _ = gradients(updater(copy.deepcopy(model), words, layout=PADDED), batch)
    again, found, _ = gradients(updater(model, words, layout=BRANCHED), batch)
    assert again == pytest.approx(loss, rel=STEP, abs=STEP)
    assert_gradients_close(found, expected)


def test_with_it_no_sequence_is_left_out(tmp_path):
    model = make("Mixtral", tmp_path)
    batch = ragged_batch(prompts=2, n=3)
    batch.advantages[1] = 0
    without = updater(copy.deepcopy(model))
    assert without.trained_sequences(batch, range(6)) == [0, 2, 3, 4, 5]
    assert "router_loss" not in gradients(without, batch)[2]
    update = updater(model, f"model.router_loss_coef={COEF}")
    assert update.trained_sequences(batch, range(6)) == list(range(6))
    assert update(batch)["actor/router_loss"] > 0


SMALL = {"num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, **EXPERTS}
OTHERS = {
    "Olmoe": SMALL,
    "Qwen2Moe": SMALL | {"shared_expert_intermediate_size": 16},
    "GraniteMoe": SMALL,
    "Ernie4_5_Moe": SMALL | {"moe_k": 2, "moe_layer_start_index": 1},
    "JetMoe": SMALL | {"kv_channels": 8},
}


def small(kind: str, **extra):
    torch.manual_seed(0)
    return sharpened(getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**extra)))


def dbrx():
    torch.manual_seed(0)
    config = transformers.DbrxConfig(
        d_model=32,
        n_heads=4,
        n_layers=2,
        vocab_size=SHAPE["vocab_size"],
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    )
    return sharpened(transformers.DbrxForCausalLM(config))


@pytest.mark.parametrize("kind", [*OTHERS, "Dbrx"])
def test_it_is_what_the_model_itself_reports(kind):
    model = dbrx() if kind == "Dbrx" else small(kind, **SHAPE | OTHERS[kind])
    batch = ragged_batch(prompts=1, n=1)
    fed = torch.cat([batch.prompt_tokens, batch.tokens])[None, :-1]
    own = copy.deepcopy(model).eval()(input_ids=fed, output_router_logits=True).aux_loss
    check_router_loss(COEF, model.config)
    check_router(COEF, model)
    update = updater(model, f"model.router_loss_coef={COEF}")
    loss, ours, sums = gradients(update, batch)
    assert sums["router_loss"] / sums["tokens"] == pytest.approx(float(own.detach()), rel=STEP)
    plain, without, _ = gradients(updater(model), batch)
    assert loss == pytest.approx(plain + COEF * float(own.detach()), rel=STEP, abs=STEP)
    assert any(not torch.equal(ours[name], without[name]) for name in ours)


@pytest.mark.parametrize("kind", ["Qwen3Config", "DeepseekV2Config", "DeepseekV3Config", "GPT2Config", "Glm4MoeConfig"])
def test_a_model_without_such_a_loss_is_refused(kind):
    config = getattr(transformers, kind)()
    check_router_loss(0.0, config)
    with pytest.raises(ConfigError, match=r"model.router_loss_coef=0.1: a .* model has no load-balancing loss"):
        check_router_loss(0.1, config)
    check_router_loss(0.1, transformers.MixtralConfig())


def test_a_model_that_has_only_the_setting_is_refused_once_it_is_loaded():
    config = transformers.DogeConfig(**SHAPE | {"is_moe": False})
    check_router_loss(0.1, config)
    with pytest.raises(ConfigError, match=r"0\.1: DogeForCausalLM has no load-balancing loss .*; use model"):
        check_router(0.1, transformers.DogeForCausalLM(config))
    check_router(0.0, transformers.DogeForCausalLM(config))


def test_routers_that_are_built_otherwise_are_refused():
    config = transformers.DogeConfig(**SHAPE | {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2})
    with pytest.raises(ConfigError, match="routers of DogeForCausalLM do not give one number per token and expert"):
        check_router(0.1, transformers.DogeForCausalLM(config))


def test_a_model_with_another_loss_of_its_own_is_refused(tmp_path):
    model = make("Mixtral", tmp_path).train()
    check_router(0.1, model)
    assert model.training
    forward = model.forward

    def doubled(**options):
        output = forward(**options)
        if output.aux_loss is not None:
            output.aux_loss = 2 * output.aux_loss
        return output

    model.forward = doubled
    with pytest.raises(ConfigError, match="MixtralForCausalLM has its own load-balancing loss"):
        check_router(0.1, model)


def test_a_run_checks_the_loaded_model(tmp_path):
    torch.manual_seed(0)
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**SHAPE | {"is_moe": False}))
    model.save_pretrained(tmp_path)
    config = settings(f"model.path={tmp_path}", "model.router_loss_coef=0.1")
    with pytest.raises(ConfigError, match="DogeForCausalLM has no load-balancing loss"):
        load_policy(config, Device(hwgrpo_backends.get("cpu")), TOKENIZER)


def test_a_negative_coefficient_is_refused():
    with pytest.raises(ConfigError, match="router_loss_coef"):
        settings("model.router_loss_coef=-1")
