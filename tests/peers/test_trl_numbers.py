"""TRL's settings have, imported, the first loss, gradient and clip ratios of TRL's own GRPOTrainer."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.config import Config, load_config
from hwgrpo.migrate.imports.recipe_text import recipe_text
from hwgrpo.migrate.imports.trl_import import import_trl
from hwgrpo.migrate.imports.trl_reader import trl_settings
from hwgrpo.migrate.tables.trl_mapped import LOSSES
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.update.step_metrics import update_metrics
from hwgrpo.values import TrainBatch
from tests.support.models.steps import gradients, update_of
from tests.support.models.tiny import tiny_qwen3
from tests.support.processes.launch import ROOT
from tests.support.processes.wheels import fetched

pytestmark = pytest.mark.slow

LENGTHS = torch.tensor([5, 1, 7, 3, 2, 7, 4, 6])
N = 4
PROMPTS = [[11, 12, 13], [21, 22, 23, 24, 25]]
OFFSETS = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
MASK = torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]
LONGEST = 9

SEQUENCE = {"importance_sampling_level": "sequence"}
VLLM = {"use_vllm": True, "beta": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "the defaults": {},
    **{kind: {"loss_type": kind} for kind in LOSSES},
    **{f"{kind} with a KL": {"loss_type": kind, "beta": 0.07} for kind in LOSSES},
    "a KL without the ratio": {"beta": 0.07, "use_bias_correction_kl": False},
    "clip higher": {"epsilon": 0.1, "epsilon_high": 0.28},
    "delta": {"delta": 1.25},
    "cispo's cap": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sequences": {"loss_type": "grpo", "epsilon": 0.03, "epsilon_high": 0.04, **SEQUENCE},
    "sequences with delta": {"loss_type": "grpo", "delta": 1.02, **SEQUENCE},
    "luspo of sequences": {"loss_type": "luspo", **SEQUENCE},
    "temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 0.9, "sapo_temperature_neg": 1.3},
    "vespo's exponents": {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_neg": 1.0},
    "entropy": {"entropy_coef": 0.2},
    "tokens of high entropy": {"top_entropy_quantile": 0.3},
    "entropy of tokens of high entropy": {"top_entropy_quantile": 0.3, "entropy_coef": 0.2},
    "off-policy sequences": {"off_policy_mask_threshold": 0.05},
    "temperature": {"temperature": 0.7},
    **{f"scaled by {kind}": {"scale_rewards": kind} for kind in ("group", "batch", "none")},
    "weights": {"reward_weights": [0.3, 2.0]},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [0.3, 2.0]},
    **{f"vLLM, {mode}": {**VLLM, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.05}
       for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")},
}  # fmt: skip
BATCH = {"per_device_train_batch_size": 8, "num_generations": N, "max_completion_length": LONGEST}


def policy_logprobs(model: Any, temperature: float = 1.0) -> torch.Tensor:
    """Return [B, T] fp32 log-probs of the completions, one sequence at a time."""
    found = torch.zeros(MASK.shape)
    tokens = fixed_tokens()
    with torch.no_grad():
        for s, length in enumerate(LENGTHS.tolist()):
            prompt = torch.tensor(PROMPTS[s // N])
            ids = torch.cat([prompt, tokens[OFFSETS[s] : OFFSETS[s + 1]]])
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
            found[s, :length] = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
    return found


def fixed_tokens() -> torch.Tensor:
    return torch.randint(3, 60, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(4))


def models() -> tuple[Any, Any]:
    """Return the policy and the reference model, which differ."""
    vocab = len(character_tokenizer(""))
    reference, policy = tiny_qwen3(vocab=vocab, tied=False), tiny_qwen3(vocab=vocab, tied=False)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=g))
    return policy, reference


@pytest.fixture(scope="module")
def given() -> dict[str, torch.Tensor]:
    """Log-probs of the policy before some updates and of the engine, [B, T]; rewards of two functions, [B, 2]."""
    g = torch.Generator().manual_seed(6)
    now = policy_logprobs(models()[0])
    old = (now + 0.25 * torch.randn(now.shape, generator=g)) * MASK
    rollout = (now + 0.1 * torch.randn(now.shape, generator=g)) * MASK
    rewards = torch.rand(len(LENGTHS), 2, generator=g)
    return {"now": now, "old": old, "rollout": rollout, "rewards": rewards}


@pytest.fixture(scope="module")
def theirs(given: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What TRL's trainer computes in a process of its own."""
    folder = tmp_path_factory.mktemp("trl")
    policy, reference = models()
    policy.save_pretrained(folder / "policy")
    reference.save_pretrained(folder / "reference")
    character_tokenizer("").save_pretrained(folder / "reference")
    tokens = fixed_tokens()
    fixed = {
        "prompts": PROMPTS,
        "prompt_index": torch.arange(len(PROMPTS)).repeat_interleave(N),
        "completions": [part.tolist() for part in tokens.split(LENGTHS.tolist())],
        "rewards": given["rewards"],
        "old_logprobs": given["old"],
        "rollout_logprobs": [row[:n].tolist() for row, n in zip(given["rollout"], LENGTHS.tolist(), strict=True)],
    }
    torch.save((fixed, {name: BATCH | case for name, case in CASES.items()}), folder / "cases.pt")
    paths = os.pathsep.join(str(ROOT / each) for each in (".", "backends", "kernels"))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("trl_worker.py")), str(fetched("trl", ("trl",))), str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "found.pt", weights_only=False)


def imported_config(case: dict[str, Any], folder: Path) -> Config:
    """Return what fields of a GRPOConfig become here."""
    result = import_trl(
        trl_settings(BATCH | case | {"model_name_or_path": "unused", "dataset_name": "rows.jsonl", "bf16": False}, {})
    )
    assert result.refused() == []
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe_text(result, "a test"))
    first, second = case.get("reward_weights", [1, 1])
    functions = f"[{{name: exact_match, weight: {first}}}, {{name: gsm8k, weight: {second}}}]"
    own = ["data.train=task://sort", "data.split=train", f"reward.functions={functions}"]
    engine = ["rollout.engine=local"] if case.get("use_vllm") else []
    return load_config(recipe, [*own, *engine])


def first_step_here(
    config: Config, given: dict[str, torch.Tensor], *, vllm: bool
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Return our loss, gradients and metrics; with vLLM on policy, but for the gap of engine and trainer."""
    old, rollout = (given["now"], given["rollout"]) if vllm else (given["old"], given["old"])
    rewards, groups = given["rewards"].double(), torch.arange(len(PROMPTS)).repeat_interleave(N)
    weights = [each.weight for each in config.reward.functions]
    parts = {f"{i}": (weight, rewards[:, i]) for i, weight in enumerate(weights)}
    total = (rewards * torch.tensor(weights, dtype=torch.float64)).sum(1)
    valid = torch.ones(len(LENGTHS), dtype=torch.bool)
    policy, reference = models()
    batch = TrainBatch(
        prompt_tokens=torch.tensor([token for prompt in PROMPTS for token in prompt]),
        prompt_offsets=torch.tensor([0, 3, 8]),
        prompt_index=groups,
        tokens=fixed_tokens(),
        offsets=OFFSETS,
        advantages=group_advantages(total, groups, valid, config.algorithm.advantage, LENGTHS, parts),
        logprobs=rollout[MASK],
        old_logprobs=old[MASK],
        ref_logprobs=policy_logprobs(reference, config.rollout.temperature)[MASK],
    )
    options = HeadOptions(temperature=config.rollout.temperature, chunk_rows=config.kernels.chunk_rows)
    model = PolicyModel(policy, compute_dtype=torch.float32, options=options)
    loss, found, sums = gradients(update_of(model, config), batch)
    return loss, found, update_metrics(sums | {"loss": loss}, [1.0], 0.0)


@pytest.mark.parametrize("name", CASES)
def test_the_first_loss_and_its_gradient(
    name: str, given: dict[str, torch.Tensor], theirs: dict[str, Any], tmp_path: Path
):
    config = imported_config(CASES[name], tmp_path)
    loss, found, metrics = first_step_here(config, given, vllm="use_vllm" in CASES[name])
    expected = theirs[name]
    assert loss == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
    assert found.keys() == expected["gradients"].keys()
    scale = max(float(each.abs().max()) for each in expected["gradients"].values())
    assert scale > 1e-4
    for key, gradient in expected["gradients"].items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-5 * scale)
    clips = expected["clips"].keys() - {"clip_ratio/low_min", "clip_ratio/high_max"}
    if "importance_sampling_level" not in CASES[name] and "use_vllm" not in CASES[name]:
        assert {key: metrics[key] for key in clips} == pytest.approx({key: expected["clips"][key] for key in clips})
