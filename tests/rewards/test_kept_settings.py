"""Rewards in the trainer's process: torch's settings, its generators and other calls are as if they had not run."""

import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.config.schema import AdvantageConfig, AlgorithmConfig, CorrectionConfig, KlConfig, LossConfig, ObserveConfig
from hwgrpo.errors import RewardError
from hwgrpo.observe.custom_metrics import CustomMetrics
from hwgrpo.support import torch_settings

CHANGES = {
    "the default dtype": "torch.set_default_dtype(torch.float64)",
    "the default device": "torch.set_default_device('meta')",
    "grad mode": "torch.set_grad_enabled(False)",
    "anomaly detection": "torch.autograd.set_detect_anomaly(True)",
    "the number of threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "deterministic algorithms": "torch.use_deterministic_algorithms(True, warn_only=True)",
    "the precision of float32 products": "torch.set_float32_matmul_precision('medium')",
    "the flags of cuDNN": "torch.backends.cudnn.benchmark = True",
    "the accumulation of half-precision products": (
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False"
    ),
    "the attention kernels": "torch.backends.cuda.enable_flash_sdp(False)",
}
"""Setting -> what changes it."""
FUNCTION = """
import torch
{imported}

def {name}(solution_str):
    {called}
    return 1.0
"""


@pytest.fixture(autouse=True)
def settings_of_the_test():
    """Print each note anew, and restore the settings after a test that fails."""
    torch_settings._print_once.cache_clear()
    with torch_settings.kept_torch_settings("the test"):
        yield


def settings():
    return {name: read() for name, (read, _) in torch_settings.SETTINGS.items()}


@pytest.mark.parametrize("when", ["called", "imported"])
@pytest.mark.parametrize("setting", CHANGES)
def test_a_setting_of_torch_that_a_reward_changes_is_restored_and_named_once(
    setting, when, pipeline, make_batch, capsys
):
    before = settings()
    assert {*before} == {*CHANGES}
    source = {"imported": "", "called": "pass", when: CHANGES[setting]}
    scored = pipeline(FUNCTION.format(name="meddles", **source), name="meddles")
    for _ in range(2):
        assert scored.score(*make_batch([["a", "b"]])).total.tolist() == [1, 1]
    assert settings() == before
    said = capsys.readouterr().out
    assert said.count("hwgrpo: ") == 1
    was = before[setting]
    shown = {
        "the precision of float32 products": "{'float32 matmul precision': 'highest'",
        "the flags of cuDNN": "{'benchmark': False} to {'benchmark': True}",
        "the accumulation of half-precision products": "{'allow_bf16_reduced_precision_reduction': True} to ",
        "the attention kernels": "{'flash': True} to {'flash': False}",
    }
    was = shown.get(setting, f"{was} to ")
    assert f"reward meddles changed {setting} of torch from {was}" in said
    assert "`workers: 1`" in said


@pytest.mark.parametrize(
    ("changes", "flag", "value"),
    [
        ("torch.backends.cudnn.enabled = False", "enabled", True),
        ("torch.backends.cudnn.deterministic = True", "deterministic", False),
        ("torch.backends.cudnn.benchmark_limit = 3", "benchmark_limit", torch.backends.cudnn.benchmark_limit),
        ("torch.backends.cudnn.allow_tf32 = False", "allow_tf32", True),
    ],
)
def test_each_flag_of_cudnn_is_restored(changes, flag, value, pipeline, make_batch):
    pipeline(FUNCTION.format(name="f", imported="", called=changes)).score(*make_batch([["a"]]))
    assert getattr(torch.backends.cudnn, flag) == value


@pytest.mark.parametrize("when", ["called", "imported"])
@pytest.mark.parametrize(
    "changes",
    [
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
        "torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.allow_tf32 = False",
    ],
)
def test_a_precision_that_a_reward_sets_by_any_interface_of_torch_is_restored(
    changes, when, pipeline, make_batch, capsys
):
    before = settings()
    scored = pipeline(FUNCTION.format(name="f", **{"imported": "", "called": "pass", when: changes}))
    for _ in range(2):
        assert scored.score(*make_batch([["a", "b"]])).total.tolist() == [1, 1]
    assert settings() == before
    assert torch.get_float32_matmul_precision() == "highest"
    assert capsys.readouterr().out.count("changed the precision of float32 products of torch from {") == 1


def test_rewards_score_where_the_interfaces_to_the_precision_are_mixed_already(pipeline, make_batch):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    changes = "torch.set_float32_matmul_precision('medium')"
    scored = pipeline(FUNCTION.format(name="f", imported="", called=changes))
    assert scored.score(*make_batch([["a"]])).total.tolist() == [1]
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_setting_is_restored_where_the_reward_raises(pipeline, make_batch):
    scored = pipeline("def f(solution_str):\n    import torch\n    torch.set_default_dtype(torch.float64)\n    1 / 0")
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        scored.score(*make_batch([["a"]]))
    assert torch.get_default_dtype() == torch.float32


def test_a_reward_that_changes_nothing_prints_nothing(pipeline, make_batch, capsys):
    pipeline("def f(solution_str): return 1.0").score(*make_batch([["a"]]))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("does", ["torch.manual_seed(0)", "torch.rand(3)", "pass"])
def test_the_trainers_generator_is_as_before_and_a_reward_draws_its_own_numbers_by_step(does, pipeline, make_batch):
    source = f"import torch\ndef f(solution_str):\n    {does}\n    return torch.rand(()).item()"
    scored, batch = pipeline(source), make_batch([["a", "b"]])
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second, again = (scored.score(*batch, step).total.tolist() for step in (1, 2, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert first == again
    assert (first == second) == ("manual_seed" in does)


def test_a_setting_that_a_metric_of_the_user_changes_is_restored_and_named(tmp_path, make_batch, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\ndef wide(prompts, completions, rewards, advantages):\n"
        "    torch.set_default_dtype(torch.float64)\n    return {'x': [1.0]}\n"
    )
    metrics = CustomMetrics(ObserveConfig(metrics=[f"{file}:wide"]))
    assert metrics.measure(*make_batch([["a"]]), None, torch.zeros(1)) == {"x": [1.0]}  # type: ignore[arg-type]
    assert torch.get_default_dtype() == torch.float32
    assert "wide' changed the default dtype of torch" in capsys.readouterr().out


ALGORITHM = """
import torch
from hwgrpo.algorithms.scope import scoped
{imported}

def advantage(rewards_S, group_S, valid_S, config, lengths_S):
    {called}
    return rewards_S.float()

@scoped("token")
def loss(x, config):
    {called}
    return -x.log_ratio.exp() * x.advantage, {{}}

def selection(tokens, config):
    {called}
    return tokens.logprob_R < 0

@scoped("token", selects=selection)
def selecting(x, config):
    return -x.advantage, {{}}

@scoped("token")
def correction(log_ratio_N, config, cu_seqlens):
    {called}
    return log_ratio_N.exp()

def kl(logprob_N, ref_logprob_N):
    {called}
    return (ref_logprob_N - logprob_N).square()
"""


def call_advantage(name):
    rewards_S = torch.tensor([1.0, 0.0], dtype=torch.float64)
    group_S, valid_S = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    group_advantages(rewards_S, group_S, valid_S, AdvantageConfig(name=name))


def call_loss(algorithm):
    stats: Any = SimpleNamespace(
        logprob=torch.zeros(3, requires_grad=True), entropy=None, full_kl=None, cu_seqlens=None
    )
    rows: dict[str, torch.Tensor] = dict.fromkeys(
        ("old_logprob", "rollout_logprob", "ref_logprob", "advantage", "weight"), torch.ones(3)
    )
    loss, _ = build_loss(algorithm)(stats, rows)
    loss.sum().backward()


def call_selection(algorithm):
    tokens: Any = SimpleNamespace(logprob_R=torch.tensor([-1.0, 0.0]))
    assert build_loss(algorithm).selections["selected"](tokens).tolist() == [True, False]


USES: dict[str, tuple[str, Any]] = {
    "advantage": ("algorithm.advantage.name", call_advantage),
    "loss": ("algorithm.loss.name", lambda name: call_loss(AlgorithmConfig(loss=LossConfig(name=name)))),
    "selecting": (
        "algorithm.loss.name",
        lambda name: call_selection(AlgorithmConfig(loss=LossConfig(name=name))),
    ),
    "correction": (
        "algorithm.correction.name",
        lambda name: call_loss(AlgorithmConfig(correction=CorrectionConfig(name=name))),
    ),
    "kl": ("algorithm.kl.estimator", lambda name: call_loss(AlgorithmConfig(kl=KlConfig(estimator=name)))),
}
"""Function of `ALGORITHM` -> the setting that names it, what calls it."""


@pytest.mark.parametrize("when", ["called", "imported"])
@pytest.mark.parametrize("function", USES)
def test_a_setting_that_a_function_of_the_algorithm_changes_is_restored_at_each_call(function, when, tmp_path, capsys):
    file = tmp_path / "mine.py"
    changes = "torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark"
    file.write_text(ALGORITHM.format(**{"imported": "", "called": "pass", when: changes}))
    (key, call), before = USES[function], settings()
    for _ in range(2):
        call(f"{file}:{function}")
        assert settings() == before
    said = capsys.readouterr().out
    assert said.count("hwgrpo: ") == 1
    assert f"mine.py:{function}' changed the flags of cuDNN of torch" in said
    if when == "called":
        assert f"{key}='{file}" in said


CANCELS = """
    import asyncio

    async def f(solution_str):
        if solution_str == "all":
            for task in asyncio.all_tasks():
                task.cancel()
        await asyncio.sleep(0.05)
        return 1.0

    async def listed(completions, **columns):
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(0.05)
"""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "workers"), [("f", 0), ("f", 1), ("listed", 0)])
def test_an_async_reward_that_cancels_all_tasks_fails_and_does_not_end_the_run(name, workers, pipeline, make_batch):
    policy = {"on_error": "mask_sample", "workers": workers}
    scored = pipeline(textwrap.dedent(CANCELS), name=name, **policy)
    rewards = scored.score(*make_batch([["a", "all", "b"]]))
    assert rewards.valid.tolist() == [False] * 3
    assert rewards.failures == {f"errors/{name}": 3}
    assert "was cancelled" in rewards.first_failures[f"errors/{name}"]
    if name == "f":
        assert scored.score(*make_batch([["a", "b"]])).total.tolist() == [1, 1]
