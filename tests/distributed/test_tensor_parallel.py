"""Tensor-parallel ranks (trainer.tensor_parallel_size) compute the results of one process, each with its shard."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.config.schema import AlgorithmConfig
from hwgrpo.errors import ConfigError
from hwgrpo.training.policy.layout_check import compute_unsharded_states
from hwgrpo.training.policy.layouts import BRANCHED, PADDED
from hwgrpo.training.policy.micro_batch import build_micro_batch
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.policy.sequence_shard import SINGLE_RANK, SequenceGroup, join_sequence_group, shard_micro_batch
from hwgrpo.training.sequence_checks import verify_sequence_parallel
from hwgrpo.training.strategies.fsdp2 import Fsdp2
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.train_batch import loss_signals, with_weights
from tests.distributed.sequence_cases import CASES, TENSOR, cut_policy, kept_bytes, run_all, run_case
from tests.support.models.families import ALTERNATING, SHAPE
from tests.support.models.tiny import ragged_batch, settings, tiny_llama, tiny_qwen3
from tests.support.numbers.rounding import assert_gradients_close, assert_updates_close
from tests.support.processes.ranks import forked

RUNS = {
    (2, 2): [
        *("padded", "packed", "grouped", "branched", "masked groups, untied head", "one micro-batch for each row"),
        *("a loss of sequences", "on policy", "window, two key heads", "layers recomputed", "autocast", "biases"),
    ],
    (4, 2): ["padded", "branched", "biases"],
    (4, 4): ["biases"],
}
"""Ranks and sizes of groups -> cases."""
LLAMA4_SCALE = {"rope_type": "default", "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4}
FAMILIES = {
    "Cohere": {},  # attention and the feed-forward part side by side
    "Gemma2": {"head_dim": 8, "attn_logit_softcapping": 2.0, **ALTERNATING},
    "Gemma3": {"head_dim": 8, **ALTERNATING},  # norms of heads, positions for each kind of layer
    "GPTNeoX": {},  # one projection for queries, keys and values; biases; blocks that return tuples
    "Granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "Ministral3": {"head_dim": 8, "rope_parameters": LLAMA4_SCALE},  # its attention reads position_ids
    "Phi": {},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Starcoder2": {"sliding_window": 4},
}
"""Further values of the config of a tiny model."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    known: dict[tuple[int, int], Path] = {}

    def of(ranks: int, size: int, case: str) -> dict[str, torch.Tensor]:
        key = ranks, size
        if key not in known:
            known[key] = tmp_path_factory.mktemp("out")
            assert forked(ranks, lambda rank: run_all(known[key], [(TENSOR, size)], RUNS[key])) == [0] * ranks
        return load_file(known[key] / f"{TENSOR} {size} {case}")

    return of


@pytest.mark.parametrize(
    ("ranks", "size", "case"), [(ranks, size, case) for (ranks, size), cases in RUNS.items() for case in cases]
)
def test_ranks_that_layers_are_cut_over_update_as_one_does(ranks: int, size: int, case: str, found):
    several, one = found(ranks, size, case), run_case(Single(torch.device("cpu"), "gloo"), CASES[case], 1)
    assert {"loss", "norm", "met", "scored", "squares", "some scored", "reference"} < one.keys() == several.keys()
    fed, fed_alone = several.pop("tokens fed").view(-1, size), one["tokens fed"]
    assert torch.equal(fed, fed[:, :1].expand_as(fed)), "ranks of a group go through the same micro-batches"
    assert float(fed.sum()) < 1.5 * float(fed_alone), "each with a part of the tokens"
    assert_updates_close(several, {key: one[key] for key in several}, CASES[case].tolerance)


def test_each_rank_keeps_a_part_of_every_layer_and_of_what_a_pass_keeps_for_its_backward(tmp_path: Path):
    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        (tmp_path / str(rank)).write_text(str(kept_bytes(2, rank, tensor=True)))
        strategy = Fsdp2(torch.device("cpu"), "gloo")
        config = settings("trainer.strategy=fsdp2", "trainer.tensor_parallel_size=2")
        strategy.prepare(config)
        policy = PolicyModel(tiny_qwen3(), compute_dtype=torch.float32, options=HeadOptions())
        strategy.wrap(policy, config)
        for name, whole in tiny_qwen3().named_parameters():
            held = dict(policy.model.named_parameters())[name].to_local()
            assert held.numel() * (2 if "proj" in name else 1) == whole.numel(), name
            assert held.untyped_storage().nbytes() == held.nbytes, name
        strategy.close()
        dist.destroy_process_group()

    assert forked(2, body) == [0, 0]
    whole = kept_bytes(1)
    for rank in range(2):
        # beside half of all else: the inputs of attention and of the gated part, with the tokens of both
        assert 0.45 < int((tmp_path / str(rank)).read_text()) / whole < 0.75


def test_layers_that_do_not_add_up_over_ranks_are_refused_on_every_rank():
    """The results of one rank with unsharded layers are the reference."""

    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        group = join_sequence_group(2, "gloo", tensor=True)
        whole = PolicyModel(tiny_llama(), compute_dtype=torch.float32, options=HeadOptions())
        states = compute_unsharded_states(whole)
        policy = cut_policy(group, tiny_llama())
        for layout in (PADDED, BRANCHED):
            verify_sequence_parallel(policy, layout, group, states)
        # a norm of sums that are not complete yet
        policy.base.model.layers[1].mlp.down_proj.register_forward_hook(lambda _, given, output: output.tanh())
        with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: LlamaForCausalLM: .* would differ by .*; use"):
            verify_sequence_parallel(policy, PADDED, group, states)
        dist.destroy_process_group()

    assert forked(2, body) == [0, 0]


def random_model(family: str, extra: dict[str, object]) -> torch.nn.Module:
    """Return a model in whose norms and biases no ones and zeros hide that they are left out."""
    torch.manual_seed(3)
    kind = "Gemma3Text" if family == "Gemma3" else family
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SHAPE | extra))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def passed(policy: PolicyModel, group: SequenceGroup) -> dict[str, torch.Tensor]:
    """Return the gradients that a pass leaves in this rank's parameters."""
    batch = ragged_batch(old=True)
    every = range(len(batch))
    rows = PADDED.rows(batch, every, 1000, policy.hidden_size)
    batch = with_weights(batch, every, torch.ones(len(batch)))
    micro = build_micro_batch(batch, rows, loss_signals(batch, rollout=False), PADDED, group.size)
    policy(shard_micro_batch(micro, group, full_sequences=False), build_loss(AlgorithmConfig())).loss.backward()
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


def test_families_with_other_blocks_get_the_gradients_of_one_process():
    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        group = join_sequence_group(2, "gloo", tensor=True)
        for family, extra in FAMILIES.items():
            whole = PolicyModel(random_model(family, extra), compute_dtype=torch.float32, options=HeadOptions())
            states, true = compute_unsharded_states(whole), passed(whole, SINGLE_RANK)
            policy = cut_policy(group, random_model(family, extra))
            verify_sequence_parallel(policy, PADDED, group, states)
            found = passed(policy, group)
            assert found.keys() == true.keys(), family
            for name, gradient in found.items():
                part = [dim for dim in range(gradient.ndim) if gradient.shape[dim] < true[name].shape[dim]]
                if part:
                    true[name] = true[name].chunk(2, part[0])[rank]
                else:
                    found[name] = group.sum(gradient)
            assert_gradients_close(found, true, what=f"{family}: ")
        dist.destroy_process_group()

    assert forked(2, body) == [0, 0]
