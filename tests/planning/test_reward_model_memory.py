"""The memory of reward models in a plan: their weights, what a batch needs, and where both are."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSequenceClassification, Qwen3Config

from hwgrpo.cli.main import main
from hwgrpo.config import load_config
from hwgrpo.planning.memory import Memory, Work, estimate
from hwgrpo.planning.model_shape import model_shape
from hwgrpo.planning.reward_model_memory import RewardModelSize, uncounted_reward_models
from tests.support.models.reward_models import save_reward_model
from tests.support.models.tiny import tiny_qwen3

WORK = Work(dtype=torch.float32, device_type="meta", prompts=4, prompt_tokens=20, micro_batch_tokens=64, samples=False)


def planned(reward: str = "reward_model", device: str = "meta", **kwargs: object) -> tuple[Memory, int]:
    """Return a run's memory with a reward model, and its peak without one."""
    given = json.dumps([{"name": reward, "kwargs": kwargs}])
    work = Work(**{**WORK.__dict__, "device_type": device})
    memories = []
    for functions in (given, "[exact_match]"):
        words = ("model.path=unused", "data.train=task://sort", f"reward.functions={functions}", "rollout.n=4")
        config = load_config(None, [*words, "data.max_prompt_tokens=20", "rollout.max_response_tokens=12"])
        memories.append(estimate(config, model_shape(config.model, tiny_qwen3().config), work))
    return memories[0], memories[1].peak


def size_of(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(
    "reward, kind, kwargs",
    [
        ("reward_model", "decoder", {}),
        ("reward_model", "encoder", {}),
        ("process_reward_model", "decoder of tokens", {"reduce": "min"}),
        ("process_reward_model", "language model", {"reduce": "min", "kind": "label_tokens"}),
    ],
)
def test_the_weights_are_those_of_the_model(tmp_path: Path, reward, kind, kwargs):
    model = save_reward_model(tmp_path, kind)
    memory, _ = planned(reward, path=str(tmp_path), **kwargs)
    assert memory.always[f"{reward} 0 (float32)"] == size_of(model)
    halved, _ = planned(reward, path=str(tmp_path), dtype="bfloat16", **kwargs)
    assert halved.always[f"{reward} 0 (bfloat16)"] * 2 == size_of(model)


def test_the_weights_are_counted_where_they_are(tmp_path: Path):
    weights = size_of(save_reward_model(tmp_path, "decoder"))
    name = "reward_model 0 (float32)"
    here, without = planned(path=str(tmp_path))
    on_host, _ = planned(path=str(tmp_path), place="cpu")
    moved, _ = planned(path=str(tmp_path), offload=True)
    assert (here.always[name], here.host) == (weights, {})
    assert here.peak >= without + weights
    assert (on_host.host[name], on_host.peak, on_host.rewards) == (weights, without, {})
    assert moved.host[name] == moved.rewards[f"{name}, while it scores"] == weights
    assert name not in moved.always
    assert moved.rewards_peak - here.rewards_peak == 0, "it is on the device while it scores"
    cpu, _ = planned(path=str(tmp_path), device="cpu", place="cpu")
    assert (cpu.always[name], cpu.host) == (weights, {})


def test_a_large_batch_of_a_reward_model_can_be_the_peak(tmp_path: Path):
    save_reward_model(tmp_path, "decoder")
    size = RewardModelSize(10, torch.float32, hidden=32, intermediate=48, longest=256)
    few, _ = planned(path=str(tmp_path), tokens_per_batch=100)
    most, _ = planned(path=str(tmp_path))
    [(_, small)], [(name, large)] = few.rewards.items(), most.rewards.items()
    assert small == size.activations(100, 32)
    assert large == size.activations(4 * 4 * 32, 32), "no more than the responses of a step"
    assert "activations of 512 tokens" in name
    assert most.peak == most.rewards_peak > max(most.update_peak, most.rollout_peak)


class Allocated(TorchDispatchMode):
    """The most bytes of new tensors that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = weakref.WeakSet()

    def _free(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        for each in tree_leaves(result):
            if torch.is_tensor(each) and (storage := each.untyped_storage())._cdata not in inputs:
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result


def test_the_activations_are_about_those_of_a_forward_pass():
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        pad_token_id=0,
    )
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config).eval()
    ids = torch.ones(8, 64, dtype=torch.int64)
    with torch.inference_mode(), Allocated() as allocated:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    size = RewardModelSize(0, torch.float32, 128, 448, None)
    assert allocated.peak / 2 < size.activations(8 * 64, 64) < 2 * allocated.peak, allocated.peak


def test_a_model_that_cannot_be_read_is_named_and_the_rest_is_planned(tmp_path: Path, monkeypatch, capsys):
    def functions(path: str) -> str:
        return f"reward.functions=[{{name: reward_model, kwargs: {{path: {path}}}}}]"

    for path, reason in (("someone/unknown-model", "has no readable configuration"), ("/not/here", "is not a folder")):
        config = load_config("tiny_sort", [functions(path)])
        [line] = uncounted_reward_models(config.reward, config.model)
        assert line.startswith(f"not counted: reward_model 0: reward.functions[0].kwargs.path='{path}' {reason}")
        memory, _ = planned(path=path)
        assert not memory.rewards
    assert main(["plan", "qwen3_8b_math", functions("/not/here"), "--chip", "H100 SXM"]) == 0
    assert "not counted: reward_model 0" in capsys.readouterr().out
    assert main(["plan", "qwen3_8b_math", functions("/not/here"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["not_counted"]) == 1


def test_a_plan_and_a_dry_run_show_a_reward_model(tmp_path: Path, capsys):
    save_reward_model(tmp_path / "model", "decoder")
    functions = f"reward.functions=[{{name: reward_model, kwargs: {{path: {tmp_path}/model}}}}]"
    assert main(["plan", "tiny_sort", functions, "--chip", "H100 SXM"]) == 0
    page = capsys.readouterr().out
    assert "reward_model 0 (float32)" in page
    assert "reward_model 0: activations of" in page
    assert main(["train", "tiny_sort", functions, "--dry-run", f"trainer.output_dir={tmp_path}/run"]) == 0
    assert "rewards: reward_model 0: activations of" in capsys.readouterr().out
