"""The examples of docs/kernels.md give what TRL's and verl's formulas give on full logits, with torch alone."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

REPO = Path(__file__).parents[2]
PAGE = REPO / "docs" / "kernels.md"

TRL_STUB = "class GRPOTrainer:\n    pass\n"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def page(monkeypatch):
    """The names that the page defines, after all its blocks have run; `trl` is a stand-in."""
    trl = ModuleType("trl")
    exec(TRL_STUB, trl.__dict__)
    monkeypatch.setitem(sys.modules, "trl", trl)
    names: dict = {}
    for block in blocks():
        exec(compile(block, str(PAGE), "exec"), names)
    return SimpleNamespace(**names)


def test_every_block_runs_with_torch_and_the_kernels_folder_alone(tmp_path):
    (tmp_path / "trl.py").write_text(TRL_STUB)
    ours = "assert not {'hwgrpo', 'hwgrpo_backends', 'transformers'} & {name.split('.')[0] for name in sys.modules}"
    (tmp_path / "page.py").write_text("\n".join(["import sys", *blocks(), ours, "print(len(scores.logprob))"]))
    env = {"PYTHONPATH": f"{REPO / 'kernels'}:{tmp_path}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "15\n"
    assert len(blocks()) == 8


def batch(b=4, t=7, h=16, v=50):
    """Hidden states [B,T,H], a head, completions, a ragged mask and per-token values, in fp64."""
    wide = torch.float64
    p = SimpleNamespace(
        hidden=torch.randn(b, t, h, dtype=wide, requires_grad=True),
        head=torch.nn.Linear(h, v).to(wide),
        ids=torch.randint(v, (b, t)),
        mask=(torch.arange(t) < torch.tensor([7, 1, 4, 6])[:, None]).long(),
        old=torch.randn(b, t, dtype=wide) * 0.4 - 4,
        ref=torch.randn(b, t, dtype=wide) * 0.4 - 4,
    )
    with torch.no_grad():
        p.head.weight.mul_(2)
    return p


def on_full_logits(p, temperature=1.0, bias=True) -> tuple[Tensor, Tensor]:
    """logprob and entropy [B,T]."""
    logits = torch.nn.functional.linear(p.hidden, p.head.weight, p.head.bias if bias else None) / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, p.ids[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)


def assert_same_loss_and_gradients(p, got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    leaves = p.hidden, p.head.weight
    for mine, true in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves)):
        assert true.count_nonzero() > 0
        torch.testing.assert_close(mine, true, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 4], ids=["evaluated", "accumulated over 4 steps"])
@pytest.mark.parametrize("on_policy", [False, True])
def test_the_trainer_of_the_page_has_trls_loss_and_gradients(page, on_policy, steps):
    p = batch()
    advantages = torch.tensor([1.0, -0.7, 0.3, -1.2], dtype=torch.float64)
    seen = {}

    def backbone(input_ids, attention_mask):
        seen.update(ids=input_ids, mask=attention_mask)
        prompt_and_last = p.hidden.new_full((4, 2, 16), torch.nan), p.hidden.new_full((4, 1, 16), torch.nan)
        return SimpleNamespace(last_hidden_state=torch.cat([prompt_and_last[0], p.hidden, prompt_and_last[1]], dim=1))

    trainer = page.FusedGRPOTrainer()
    trainer.accelerator, trainer.temperature = SimpleNamespace(unwrap_model=lambda model: model.wrapped), 0.7
    trainer.model, trainer.current_gradient_accumulation_steps = SimpleNamespace(training=steps > 1), max(steps, 2)
    model = SimpleNamespace(wrapped=SimpleNamespace(model=backbone, lm_head=p.head))
    inputs = {
        "prompt_ids": torch.randint(50, (4, 3)),
        "prompt_mask": torch.ones(4, 3, dtype=torch.long),
        "completion_ids": p.ids,
        "completion_mask": p.mask,
        "advantages": advantages,
        **({} if on_policy else {"old_per_token_logps": p.old}),
        "ref_per_token_logps": p.ref,
    }
    loss = trainer._compute_loss(model, inputs)
    assert torch.equal(seen["ids"][:, 3:], p.ids)
    assert torch.equal(seen["mask"][:, 3:], p.mask)

    logps, _ = on_full_logits(p, temperature=0.7)
    ratio = torch.exp(logps - (logps.detach() if on_policy else p.old))
    a = advantages[:, None]
    surrogate = torch.where((ratio * a) < (ratio.clamp(0.8, 1.2) * a), ratio * a, ratio.clamp(0.8, 1.2) * a)
    per_token = -surrogate + 0.04 * (torch.exp(p.ref - logps) - (p.ref - logps) - 1)
    assert_same_loss_and_gradients(p, loss, (per_token * p.mask).sum() / p.mask.sum() / steps)


def test_the_linear_cross_entropy_of_the_page_is_that_of_the_logits(page):
    p = batch()
    per_token = torch.rand(4, 7, dtype=torch.float64) + 0.5
    for temperature in (0.6, per_token):
        logprob, entropy = page.linear_cross_entropy(p.hidden, p.head.weight, p.ids, temperature)
        t = temperature[..., None] if torch.is_tensor(temperature) else temperature
        expected = on_full_logits(p, t, bias=False)
        weights = torch.randn(2, 4, 7, dtype=torch.float64)
        total = (logprob * weights[0] + entropy * weights[1]).sum()
        assert_same_loss_and_gradients(p, total, (expected[0] * weights[0] + expected[1] * weights[1]).sum())


def test_the_ppo_loss_of_the_page_is_verls(page):
    p = batch()
    with torch.no_grad():
        old = on_full_logits(p, bias=False)[0] + torch.randn(4, 7, dtype=torch.float64)
    old[0, 0] = old[0, 0] - 3  # a ratio beyond the dual clip
    a = torch.tensor([[-1.0], [0.5], [-0.4], [1.3]], dtype=torch.float64).expand(4, 7)
    data = {"old_log_probs": old, "advantages": a, "ref_log_prob": p.ref, "response_mask": p.mask}
    data |= {"batch_num_tokens": 40, "dp_size": 2}
    clip = (0.2, 0.28, 3.0)
    result = page.ppo_loss(p.hidden, p.head.weight, p.ids, data, clip=clip, kl_loss_coef=0.05, entropy_coeff=0.01)

    logprob, entropy = on_full_logits(p, bias=False)
    ratio = (logprob - old).clamp(-20, 20).exp()
    losses = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
    dual_clipped = (a < 0) & (losses > -3 * a)
    assert dual_clipped[0, 0]
    losses = torch.where(dual_clipped, -3 * a, losses)
    x = p.ref - logprob
    losses = losses + 0.05 * (x.exp() - x - 1).clamp(-10, 10) - 0.01 * entropy
    assert_same_loss_and_gradients(p, result.loss, (losses * p.mask).sum() / 40 * 2)
    torch.testing.assert_close(result.sums["entropy"], (entropy * p.mask).sum().detach())


def test_the_ppo_loss_of_the_page_has_the_values_verl_is_known_to_have(page):
    """One token of certain log-probability: hidden state 0, two classes."""
    for advantage, log_ratio, expected in (
        (1, 0.5, -1.28),
        (1, -0.5, -0.60653066),
        (-1, 0.5, 1.64872127),
        (-1, 1.5, 3),
    ):
        hidden = torch.zeros(1, 1, 4, dtype=torch.float64, requires_grad=True)
        old = torch.full((1, 1), -0.6931471805599453 - log_ratio, dtype=torch.float64)
        data = {"old_log_probs": old, "advantages": torch.full_like(old, advantage), "ref_log_prob": old}
        data |= {"response_mask": torch.ones(1, 1), "batch_num_tokens": 1, "dp_size": 1}
        weight = torch.zeros(2, 4, dtype=torch.float64)
        loss = page.ppo_loss(hidden, weight, torch.zeros(1, 1, dtype=torch.long), data, (0.2, 0.28, 3.0), 0.0).loss
        assert loss.item() == pytest.approx(expected, abs=1e-8)
