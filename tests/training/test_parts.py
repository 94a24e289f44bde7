"""The smaller parts of the trainer: schedule, layouts, batches, references, random state."""

import dataclasses
import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from hwgrpo.config.schema import AdvantageConfig, KlConfig, LoraConfig, RewardFunctionConfig
from hwgrpo.data.sampler import PromptSampler
from hwgrpo.errors import ConfigError, DataError, RewardError, RunError
from hwgrpo.models.loading import load_model
from hwgrpo.models.lora import apply_lora
from hwgrpo.models.saving import save_model
from hwgrpo.ragged import offsets_of
from hwgrpo.training.checkpoint import rng_state
from hwgrpo.training.evaluate import validate
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.policy.layouts import PADDED
from hwgrpo.training.policy.micro_batch import MicroBatch, build_micro_batch
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.policy.reference_model import build_reference
from hwgrpo.training.resume import seed_rank
from hwgrpo.training.shared_setup import seed_everything
from hwgrpo.training.startup_checks import check_length
from hwgrpo.training.strategies.optimizer import build_optimizer, learning_rate
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.strategies.strategy import raise_on_all_ranks
from hwgrpo.training.update import policy_update
from hwgrpo.training.update.advantage_inputs import shuffle_group, shuffle_rewards
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.train_batch import advantages_over_ranks, assemble, split_updates
from hwgrpo.values import Completions, Prompt, PromptBatch, Rewards, Sampling
from tests.support.models.tiny import ragged_batch, settings, tiny_qwen3
from tests.support.numbers.rounding import assert_values_close

NOTHING: dict[str, str] = {}
FUNCTIONS = [RewardFunctionConfig(name="exact_match")]


def policy_of(model) -> PolicyModel:
    return PolicyModel(model, compute_dtype=torch.float32, options=HeadOptions())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.775, 0.55, 0.325]),
        ("cosine", [1 / 3, 2 / 3, 1, 0.1 + 0.9 * (0.5 + 0.5 * 0.5**0.5), 0.55, 0.1 + 0.9 * (0.5 - 0.5 * 0.5**0.5)]),
    ],
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(schedule: str, expected: list[float]):
    lowest = [] if schedule == "constant" else ["optim.min_lr_ratio=0.1"]
    for warmup in ("optim.warmup_steps=2", "optim.warmup_ratio=0.2"):  # 1.2 updates, rounded up
        optim = settings(f"optim.schedule={schedule}", warmup, "optim.lr=1", *lowest).optim
        assert [learning_rate(optim, u, 6) for u in range(6)] == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"optim.warmup_steps=2 and optim.warmup_ratio=0.2 are both set"):
        settings("optim.warmup_steps=2", "optim.warmup_ratio=0.2")


def test_weight_decay_spares_norms():
    optimizer = build_optimizer(policy_of(tiny_qwen3()), settings("optim.weight_decay=0.1").optim)
    assert {(p.ndim >= 2, g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]} == {
        (True, 0.1),
        (False, 0.0),
    }


class Operators(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "passes"), [("cpu", 1), ("cuda", 1), ("npu", 0)])
def test_a_step_of_adamw_is_one_pass_where_torch_has_one(device: str, passes: int):
    kind = "meta" if device == "npu" else device  # this torch knows no npu; meta is as foreign to torch's fused step
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.empty(4, 4, device=kind))
        parameter.grad = torch.empty_like(parameter)
        optimizer = build_optimizer(torch.nn.ParameterList([parameter]), settings().optim)
        with Operators() as called:
            optimizer.step()
    assert called.names.count("_fused_adamw_") == passes
    assert ("addcdiv_" in called.names) is (not passes)


@pytest.mark.parametrize("word", ["optim.name=adamw_8bit", "trainer.offload=optimizer"])
def test_states_held_on_the_host_are_stepped_without_it_on_a_gpu(word: str):
    config = settings(word)
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.empty(4, 4, device="cuda"))
    optimizer = build_optimizer(torch.nn.ParameterList([parameter]), config.optim, offload=config.trainer.offload)
    assert not optimizer.defaults["fused"]


def test_updates_are_cut_by_prompt_though_samples_dropped_out():
    batch = dataclasses.replace(ragged_batch(prompts=4, n=2), prompt_index=torch.tensor([0, 0, 1, 3, 3, 3, 3, 3]))
    assert split_updates(batch, 4, 2) == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert split_updates(batch, 4, 1) == [[0, 1], [2], [], [3, 4, 5, 6, 7]]


def test_a_sample_taken_out_leaves_its_siblings_in_place():
    prompts = PromptBatch(tuple(Prompt(str(i), "p", (1, 2 + i), None, {}) for i in range(2)))
    completions = Completions(
        prompt_index=torch.tensor([0, 0, 1, 1]),
        tokens=torch.tensor([5, 6, 7, 8, 9, 10]),
        offsets=torch.tensor([0, 2, 3, 5, 6]),
        logprobs=torch.arange(6.0),
        finished=torch.ones(4, dtype=torch.bool),
        texts=("", "", "", ""),
    )
    batch = assemble(prompts, completions, torch.arange(4.0), torch.tensor([True, False, True, True]))
    assert batch.tokens.tolist() == [5, 6, 8, 9, 10]
    assert batch.offsets.tolist() == [0, 2, 4, 5]
    assert batch.prompt_index.tolist() == [0, 1, 1]
    assert batch.advantages.tolist() == [0, 2, 3]
    assert batch.rollout_logprobs.tolist() == [0, 1, 3, 4, 5]


def test_shuffled_rewards_are_a_permutation_of_the_valid_ones_and_repeatable():
    total = torch.arange(50.0, dtype=torch.float64)
    valid = torch.ones(50, dtype=torch.bool)
    valid[7] = False
    rewards = Rewards(total=total, valid=valid, per_function={})
    shuffled = shuffle_rewards(rewards, 0, 3, 0).total
    assert torch.equal(shuffled.sort().values, total)
    assert shuffled[7] == 7
    assert (shuffled != total).sum() > 40
    assert torch.equal(shuffled, shuffle_rewards(rewards, 0, 3, 0).total)
    assert not torch.equal(shuffled, shuffle_rewards(rewards, 0, 4, 0).total)
    of_group = shuffle_group(rewards, 0, "1:3").total
    assert torch.equal(of_group.sort().values, total)
    assert of_group[7] == 7
    assert torch.equal(of_group, shuffle_group(rewards, 0, "1:3").total)
    assert all(not torch.equal(of_group, shuffle_group(rewards, *each).total) for each in ((1, "1:3"), (0, "2:3")))


def test_the_reference_keeps_the_first_weights_while_the_policy_moves():
    policy = policy_of(tiny_qwen3())
    reference = build_reference(policy, KlConfig(coef=0.1), LoraConfig())
    before = policy(build_micro_batch(ragged_batch(), [[0], [1], [2], [3]], NOTHING, PADDED)).logprob.detach()
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.05)
    with reference.active(), torch.no_grad():
        after = reference.policy(build_micro_batch(ragged_batch(), [[0], [1], [2], [3]], NOTHING, PADDED)).logprob
    assert torch.equal(before, after)
    assert not any(p.requires_grad for p in reference.policy.parameters())
    assert build_reference(policy, KlConfig(), LoraConfig()) is None


def lora_policy(config) -> PolicyModel:
    torch.manual_seed(0)
    return policy_of(apply_lora(tiny_qwen3(), config.model.lora))


def test_with_a_fresh_adapter_the_reference_is_the_model_with_adapters_off():
    config = settings("algorithm.kl.coef=0.1", "model.lora.rank=2")
    policy, micro = lora_policy(config), build_micro_batch(ragged_batch(), [[0], [1], [2], [3]], NOTHING, PADDED)
    base = policy(micro).logprob.detach()
    move(policy, 0.3)
    reference = build_reference(policy, config.algorithm.kl, config.model.lora)
    assert reference.policy is policy
    with reference.active(), torch.no_grad():
        assert torch.equal(reference.policy(micro).logprob, base)
    assert not torch.equal(policy(micro).logprob, base)


def test_with_an_adapter_trained_further_the_reference_is_its_frozen_copy(tmp_path: Path):
    config = settings("algorithm.kl.coef=0.1", "model.lora.rank=2")
    first, micro = lora_policy(config), build_micro_batch(ragged_batch(), [[0], [1], [2], [3]], NOTHING, PADDED)
    move(first, 0.3)
    trained = first(micro).logprob.detach()
    first.model.save_pretrained(tmp_path / "adapter", selected_adapters=["default"])

    config = settings("algorithm.kl.coef=0.1", f"model.lora.adapter={tmp_path / 'adapter'}")
    policy = lora_policy(config)
    reference = build_reference(policy, config.algorithm.kl, config.model.lora)
    trainable = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trainable
    assert all(".default." in name for name in trainable)
    move(policy, 0.3)
    with reference.active(), torch.no_grad():
        assert_values_close(reference.policy(micro).logprob, trained)
    assert not torch.allclose(policy(micro).logprob, trained, atol=1e-3)
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == trainable


def move(policy: PolicyModel, distance: float) -> None:
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p.add_(distance * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))


def test_a_head_that_is_misread_is_refused():
    model = tiny_qwen3()
    plain = model.forward

    def doubled(*arguments, **words):
        output = plain(*arguments, **words)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    with pytest.raises(ValueError, match="logits differ"):
        policy_of(model)


def test_the_random_state_of_every_generator_comes_back():
    device = Device(BACKEND)
    state = rng_state.capture(device)
    assert {t.dtype for t in state.values()} == {torch.uint8}
    drawn = torch.rand(3), random.random(), np.random.rand()
    assert rng_state.restore(state, device, seed=0) is None
    again = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(drawn[0], again[0])
    assert drawn[1:] == again[1:]


def test_the_final_model_loads_in_plain_transformers(tmp_path: Path):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = tiny_qwen3()
    save_model(model, _NoTokenizer(), tmp_path, merge=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


class _NoTokenizer:
    def save_pretrained(self, folder: Path) -> None: ...


class _SecondOfTwo:
    """A strategy that stands for rank 1 beside a rank whose values are given."""

    rank, world_size = 1, 2

    def __init__(self, other):
        self.other = other

    def gather_objects(self, value):
        return [self.other, value]


def responses(prompt_index: torch.Tensor, lengths: torch.Tensor) -> Completions:
    """Return finished responses of these lengths, with tokens and log-probs of 0."""
    tokens = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    return Completions(
        prompt_index=prompt_index,
        tokens=tokens,
        offsets=offsets_of(lengths),
        logprobs=torch.zeros(len(tokens)),
        finished=torch.ones(len(lengths), dtype=torch.bool),
        texts=("",) * len(lengths),
    )


def test_groups_of_different_ranks_stay_apart_and_share_batch_statistics():
    lengths = torch.tensor([1, 1, 1, 1])
    group = torch.tensor([0, 0, 1, 1])
    valid = torch.ones(4, dtype=torch.bool)
    other, mine = torch.tensor([0.0, 0.0, 0.0, 8.0]).double(), torch.tensor([1.0, 0.0, 5.0, 5.0]).double()
    completions = responses(group, lengths)
    strategy = _SecondOfTwo((Rewards(other, valid, {"exact_match": other}), group, lengths, None))
    rewards = Rewards(total=mine, valid=valid, per_function={"exact_match": mine})
    by_group, _ = advantages_over_ranks(AdvantageConfig(std="none"), FUNCTIONS, completions, rewards, strategy)
    assert by_group.tolist() == [0.5, -0.5, 0.0, 0.0]
    by_batch, _ = advantages_over_ranks(AdvantageConfig(eps=0, std="batch"), FUNCTIONS, completions, rewards, strategy)
    whole_std = float(torch.cat([other, mine]).std())
    assert by_batch.tolist() == pytest.approx([0.5 / whole_std, -0.5 / whole_std, 0.0, 0.0])


def test_rewards_of_each_function_reach_an_estimator_by_parts_with_their_weights_from_all_ranks():
    lengths, group, valid = torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.ones(2).bool()
    completions = responses(group, lengths)

    def parts(*values: float) -> dict[str, torch.Tensor]:
        return {"exact_match": torch.tensor(values[:2]).double(), "format": torch.tensor(values[2:]).double()}

    strategy = _SecondOfTwo((Rewards(torch.zeros(2).double(), valid, parts(0, 1, 0, 4)), group, lengths, None))
    rewards = Rewards(total=torch.zeros(2).double(), valid=valid, per_function=parts(1, 0, 3, 1))
    functions = [RewardFunctionConfig(name="exact_match", weight=1), RewardFunctionConfig(name="format", weight=3)]
    found, _ = advantages_over_ranks(
        AdvantageConfig(name="gdpo", std="none"), functions, completions, rewards, strategy
    )
    # by weight and centred: -0.5 - 3 * 2 and its opposite there, 0.5 + 3 * 1 and its opposite here
    there_and_here = torch.tensor([-6.5, 6.5, 3.5, -3.5])
    torch.testing.assert_close(found, (there_and_here / there_and_here.std())[2:], rtol=1e-5, atol=0)


def test_the_kl_of_the_tokens_of_all_ranks_reaches_an_estimator_that_whitens_over_tokens():
    lengths, group, valid = torch.tensor([2, 1]), torch.zeros(2, dtype=torch.int64), torch.ones(2).bool()
    completions = responses(group, lengths)
    there, here = (torch.tensor(each).double() for each in ([0.0, 1.0], [3.0, 2.0]))
    kl_there, kl_here = (torch.tensor(each).double() for each in ([0.5, 0.25, 0.0], [1.0, -0.5, 0.1]))
    strategy = _SecondOfTwo((Rewards(there, valid, {"exact_match": there}), group, lengths, kl_there))
    rewards = Rewards(total=here, valid=valid, per_function={"exact_match": here})
    estimator = AdvantageConfig(name="reinforce_plus_plus")
    per_response, found = advantages_over_ranks(estimator, FUNCTIONS, completions, rewards, strategy, kl_R=kl_here)
    to_go = torch.tensor([0, 0.5, 1, 3, 4, 2])  # of the sum less the KL: that plus the KL of earlier tokens
    whitened = ((to_go - to_go.mean()) / to_go.std())[3:]
    torch.testing.assert_close(found, whitened, rtol=1e-5, atol=0)
    torch.testing.assert_close(per_response, torch.stack([whitened[:2].mean(), whitened[2]]), rtol=1e-5, atol=1e-6)


def test_estimators_see_the_tokens_that_carry_loss():
    group, valid = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    completions, short = (responses(group, torch.tensor(lengths)) for lengths in ([1, 4], [1, 2]))
    mask = torch.tensor([True, False, True, True, False])
    total, kl = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.5, 7.0, 0.25, 0.1, 7.0]).double()
    rewards, strategy = Rewards(total, valid, {"exact_match": total}), Single(torch.device("cpu"), "gloo")
    opo = AdvantageConfig(name="opo")
    masked, _ = advantages_over_ranks(opo, FUNCTIONS, replace(completions, loss_mask=mask), rewards, strategy)
    assert torch.equal(masked, advantages_over_ranks(opo, FUNCTIONS, short, rewards, strategy)[0])
    assert not torch.equal(masked, advantages_over_ranks(opo, FUNCTIONS, completions, rewards, strategy)[0])
    whitened = AdvantageConfig(name="reinforce_plus_plus")
    per_response, of_tokens = advantages_over_ranks(
        whitened, FUNCTIONS, replace(completions, loss_mask=mask), rewards, strategy, kl_R=kl
    )
    expected, expected_tokens = advantages_over_ranks(whitened, FUNCTIONS, short, rewards, strategy, kl_R=kl[mask])
    assert of_tokens is not None
    assert expected_tokens is not None
    assert torch.equal(per_response, expected)
    assert torch.equal(of_tokens[mask], expected_tokens)
    assert not of_tokens[~mask].any()


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"loss_mask": torch.ones(5, dtype=torch.int64)}, r"loss_mask .* dtype torch.int64; it must be torch.bool"),
        ({"loss_mask": torch.ones(4, dtype=torch.bool)}, "loss_mask .* has 4 values for 5 tokens"),
        ({"token_extras": {"mine": torch.ones(2)}}, r"token_extras\['mine'\] .* has 2 values for 5 tokens"),
    ],
)
def test_what_an_engine_adds_has_one_value_per_token(added: dict[str, Any], message: str):
    completions = responses(torch.zeros(1, dtype=torch.int64), torch.tensor([5]))
    prompts = PromptBatch((Prompt("0", "p", (1,), None, {}),))
    with pytest.raises(DataError, match=message):
        assemble(prompts, replace(completions, **added), torch.ones(1), torch.ones(1, dtype=torch.bool))


def test_each_rank_takes_its_share_of_every_update():
    class Rows:
        def prompt(self, row: int, epoch: int) -> Prompt:
            return Prompt(f"{epoch}:{row}", "p", (1,), None, {})

    def uids(rank: int, world: int) -> list[str]:
        source = PromptSource(Rows(), PromptSampler(12, 0, False), 8, 4, rank, world)
        return [p.uid for p in source.next().prompts]

    assert uids(0, 1) == [f"0:{i}" for i in range(8)]
    assert uids(0, 2) == ["0:0", "0:1", "0:4", "0:5"]
    assert uids(1, 2) == ["0:2", "0:3", "0:6", "0:7"]


def test_a_failure_on_one_rank_is_raised_on_all_with_its_message():
    def work():
        return 5

    assert raise_on_all_ranks(_SecondOfTwo(None), work) == 5
    with pytest.raises(RunError, match="reward x raised"):
        raise_on_all_ranks(_SecondOfTwo("reward x raised"), work)

    def failing():
        raise RewardError("mine")

    with pytest.raises(RewardError, match="mine"):
        raise_on_all_ranks(_SecondOfTwo(None), failing)


def test_a_models_own_dropout_is_off_and_an_adapters_asks_for_old_log_probs(tmp_path: Path):
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    assert config.resid_pdrop > 0
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = load_model(settings(f"model.path={tmp_path}").model, attention="eager")
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    assert not update_of(policy_of(model)).needs_old_logprobs
    with_dropout = settings("model.lora.rank=2", "model.lora.dropout=0.5").model.lora
    assert update_of(policy_of(apply_lora(tiny_qwen3(), with_dropout))).needs_old_logprobs


def test_losses_of_opposite_infinity_are_a_loss_that_is_no_number(monkeypatch: pytest.MonkeyPatch):
    signs = itertools.cycle([1, -1])

    def infinite(strategy: Any, micro: MicroBatch, *_: Any) -> SimpleNamespace:
        logprobs = torch.zeros(len(micro.targets))
        return SimpleNamespace(loss=torch.tensor(next(signs) * torch.inf), sums={}, logprob_N=logprobs)

    monkeypatch.setattr(policy_update, "forward_backward", infinite)
    update = update_of(policy_of(tiny_qwen3()))
    monkeypatch.setattr(policy_update, "micro_batch_tokens", lambda config, device: 32)
    batch = ragged_batch(prompts=16, n=2)
    loss, _ = update.accumulate_gradients(batch, range(len(batch)))
    assert math.isnan(loss)


def update_of(policy: PolicyModel) -> PolicyUpdate:
    strategy = Single(torch.device("cpu"), "gloo")
    strategy.wrap(policy, settings())
    return PolicyUpdate(settings(), strategy, policy, torch.device("cpu"), PADDED, total_updates=1)


def test_ranks_and_resumed_steps_draw_different_random_numbers():
    def drawn(rank: int, step: int) -> float:
        seed_everything(Device(BACKEND), 0)
        seed_rank(Device(BACKEND), settings(), rank, step)
        return torch.rand(1).item()

    assert len({drawn(0, 0), drawn(1, 0), drawn(0, 5), drawn(1, 5)}) == 4
    assert drawn(1, 5) == drawn(1, 5)


def test_a_sequence_longer_than_the_models_positions_is_refused_before_the_weights_load(tmp_path: Path):
    tiny_qwen3().config.save_pretrained(tmp_path)

    class Data:
        longest = 100

    config = settings(f"model.path={tmp_path}", "rollout.max_response_tokens=100", "trainer.tokens_per_micro_batch=500")
    with pytest.raises(ConfigError, match="128 positions; use at most 28"):
        check_length(config, Data())


def test_best_of_a_prompt_without_any_reward_is_left_out_of_the_mean():
    rewards = {1: torch.tensor([[1.0], [0.0]]), 2: torch.tensor([[1.0, 0.5], [torch.nan, torch.nan]])}

    drawn: list[Sampling] = []

    class Stage:
        def generate(self, batch, sampling):
            drawn.append(sampling)
            index = torch.arange(2).repeat_interleave(sampling.n)
            return SimpleNamespace(prompt_index=index, dropped={}, outcomes=())

        def score(self, batch, completions, drawing):
            values = rewards[len(completions.prompt_index) // 2].double().flatten()
            return Rewards(total=values.nan_to_num(), valid=~values.isnan(), per_function={"f": values + 1})

        def prompt(self, row: int, epoch: int) -> Prompt:
            assert epoch < 0, "validation must not share random numbers with training"
            return Prompt(f"{epoch}:{row}", "p", (1,), None, {}, source="s")

        def __len__(self) -> int:
            return 2

        @property
        def row_counts(self) -> dict[str, float]:
            return {"val-aux/rows": 2, "val-aux/rows_available": 3}

    stage = Stage()
    alone = Single(torch.device("cpu"), "gloo")
    own = ("temperature=0.5", "top_k=3", "top_p=0.9")
    config = settings("trainer.validation_n=2", *(f"trainer.validation_sampling.{each}" for each in own))
    values = validate(stage, stage, stage, config, alone, 0)
    greedy, sampled = drawn
    assert (greedy.n, greedy.greedy) == (1, True)
    assert (sampled.n, sampled.greedy) == (2, False)
    assert (sampled.temperature, sampled.top_k, sampled.top_p, sampled.min_p) == (0.5, 3, 0.9, 0.0)
    assert values == {
        "val-core/s/reward/greedy": 0.5,
        "val-core/s/reward/mean@2": 0.75,
        "val-core/s/reward/best@2": 1.0,
        "val-aux/s/rewards/f/mean": 1.75,
        "val-aux/s/reward/greedy/stderr": 0.5,  # the others have one prompt, whose spread is unknown
        "val-aux/rows": 2,
        "val-aux/rows_available": 3,
    }


@pytest.mark.parametrize("acted", [True, False])
def test_a_validation_has_the_rewards_of_each_environment_and_the_turns_of_sampled_trajectories(acted: bool):
    environments = ["a", "b", "a"]
    rewards = {1: [1.0, 0.0, 0.5], 2: [1.0, 0.0, 2.0, 3.0, torch.nan, torch.nan]}

    class Stage:
        @property
        def row_counts(self) -> dict[str, float]:
            return {}

        def generate(self, batch, sampling):
            index = torch.arange(3).repeat_interleave(sampling.n)
            outcomes = tuple(
                {"environment": environments[i], "turn_rewards": [0.0] * (i + sampling.n), "stop": "done",
                 "reward": 9.0, "failure": "broke" if i == 2 else "", "calls": {"look": i}, "failed_calls": {},
                 "seconds": {"look": 1}}
                for i in index.tolist()
            )  # fmt: skip
            return SimpleNamespace(prompt_index=index, dropped={}, outcomes=outcomes if acted else ())

        def score(self, batch, completions, drawing):
            values = torch.tensor(rewards[len(completions.prompt_index) // 3]).double()
            return Rewards(total=values.nan_to_num(), valid=~values.isnan(), per_function={})

        def prompt(self, row: int, epoch: int) -> Prompt:
            return Prompt(f"{row}", "p", (1,), None, {"environment": environments[row]}, source="s")

        def __len__(self) -> int:
            return 3

    stage: Any = Stage()
    values = validate(stage, stage, stage, settings("trainer.validation_n=2"), Single(torch.device("cpu"), "gloo"), 0)
    assert values["val-core/s/reward/mean@2"] == 1.5
    found = {name: value for name, value in values.items() if name.startswith("val-aux/") and "stderr" not in name}
    expected = {
        "val-aux/a/reward/greedy": 0.75,
        "val-aux/a/reward/mean@2": 0.5,
        "val-aux/a/reward/best@2": 1.0,
        "val-aux/b/reward/greedy": 0.0,
        "val-aux/b/reward/mean@2": 2.5,
        "val-aux/b/reward/best@2": 3.0,
        "val-aux/agent/turns/mean": 3.0,
        "val-aux/agent/failures": 1 / 3,
        "val-aux/agent/stop/done": 1.0,
        "val-aux/tools/call_frequency": 1.0,
        "val-aux/tools/failure_frequency": 0.0,
    }
    assert found == pytest.approx(expected if acted else {})
