"""Functions of the user's own: files, plugins and packages in place of registered names."""

import sys
from pathlib import Path

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND

from hwgrpo import user_code
from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.catalog import POLICY_LOSSES
from hwgrpo.config import load_config
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_model_config
from hwgrpo.registry import Registry
from hwgrpo.training.startup_checks import check_start

BASE = ("model.path=builtin://tiny", "data.train=task://sort?digits=2", "reward.functions=[exact_match]")
LOSSES = """
from hwgrpo.algorithms.scope import policy_loss, scoped

@scoped("sequence")
def doubled(x, config, *, factor=2.0):
    return -factor * x.advantage * x.logprob, {}

def without_scope(x, config):
    return x.logprob, {}

@policy_loss("token", reads=("clip_high",))
def capped(x, config, *, factor=2.0):
    return -factor * config.clip_high * x.advantage * x.logprob, {}

@policy_loss("token", reads=("clip_hi",))
def misspelt(x, config):
    return x.logprob, {}
"""


def load(*overrides: str):
    return load_config(None, [*BASE, *overrides])


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(user_code, "_plugins", [])  # else processes of later tests would import them too
    (tmp_path / "losses.py").write_text(LOSSES)
    return tmp_path


class Stats:
    logprob = torch.tensor([-1.0], requires_grad=True)
    entropy = None
    full_kl = None
    cu_seqlens = torch.tensor([0, 1])


def test_a_loss_from_a_file_gets_its_arguments_and_keeps_its_scope(losses: Path):
    loss = build_loss(load("algorithm.loss.name=losses.py:doubled", "algorithm.loss.kwargs.factor=3").algorithm)
    value, _ = loss(Stats(), {"advantage": torch.tensor([2.0]), "weight": torch.ones(1)})
    assert value.item() == 6.0
    assert loss.scope == "sequence"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.loss.name=losses.py:trebled"], r"has no function 'trebled'; it has: .*doubled"),
        (["algorithm.loss.name=losses.py:without_scope"], r"algorithm\.loss\.name=.*put @scoped"),
        (["algorithm.loss.name=losses.py:doubled", "algorithm.loss.kwargs.factr=3"], r"kwargs=.*'factr'"),
        (
            ["algorithm.loss.name=losses.py:capped", "algorithm.loss.delta=2"],
            r"algorithm\.loss\.delta=2\.0 has no effect with algorithm\.loss\.name='losses\.py:capped', whose "
            r"decorator declares reads=\('clip_high',\); add 'delta' there .*gspo or ppo_clip, or leave .*default null",
        ),
        (
            ["algorithm.loss.name=losses.py:misspelt"],
            r"losses\.py:misspelt': reads='clip_hi' .*Did you mean 'clip_high'",
        ),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_when_it_is_built(losses: Path, overrides: list[str], message: str):
    algorithm = load(*overrides).algorithm
    with pytest.raises(ConfigError, match=message):
        build_loss(algorithm)


def test_a_loss_that_declares_what_it_reads_takes_that_and_one_that_does_not_takes_all(losses: Path):
    capped = ("algorithm.loss.name=losses.py:capped", "algorithm.loss.clip_high=0.5", "algorithm.loss.kwargs.factor=3")
    value, _ = build_loss(load(*capped).algorithm)(Stats(), {"advantage": torch.tensor([2.0]), "weight": torch.ones(1)})
    assert value.item() == 3.0
    doubled = load("algorithm.loss.name=losses.py:doubled", "algorithm.loss.tau_pos=2", "algorithm.loss.clip_low=0.1")
    assert build_loss(doubled.algorithm).scope == "sequence"


def test_what_a_loss_does_not_read_is_refused_before_the_model_is_loaded(losses: Path):
    config = load("algorithm.loss.name=losses.py:capped", "algorithm.loss.clip_low=0.1")
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.clip_low=0\.1 has no effect"):
        check_start(config, BACKEND, load_model_config(config.model), device=None, data=None)


@pytest.mark.parametrize("value", ["abc", "null", "[1]", "true", ".nan", ".inf"])
@pytest.mark.parametrize("words", [("loss", "dro", "beta"), ("advantage", "online_rft", "threshold")])
def test_arguments_of_built_in_functions_are_finite_numbers(words: tuple[str, str, str], value: str):
    section, name, argument = words
    overrides = [f"algorithm.{section}.name={name}", f"algorithm.{section}.kwargs={{{argument}: {value}}}"]
    with pytest.raises(ConfigError, match=rf"algorithm\.{section}\.kwargs\.{argument}=.* use a finite number"):
        load(*overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "algorithm.loss.name=loses.py:doubled",
            r"algorithm\.loss\.name='loses.py:doubled': there is no file loses.py",
        ),
        ("algorithm.kl.estimator=no.py:f", r"algorithm\.kl\.estimator='no.py:f': there is no file"),
        ("observe.loggers=[jsonl,no.py:F]", r"observe\.loggers='no.py:F': there is no file"),
        ("observe.metrics=[no.py:f]", r"observe\.metrics='no.py:f': there is no file"),
        ("observe.metrics=[words]", r"observe\.metrics='words'.*path/to/file\.py:function"),
        ("observe.kwargs.doubled.x=3", r"observe\.kwargs='doubled'"),
        ("algorithm.loss.kwargs.factor=3", r"no effect.*algorithm\.loss\.name=path/to/file\.py:function"),
        ("plugins=[no.py]", r"plugins\.0='no.py': no file"),
        ("plugins=[no_such_module]", r"plugins\.0='no_such_module': importing the module failed"),
    ],
)
def test_a_mistake_is_refused_before_the_run(losses: Path, override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load("algorithm.kl.coef=0.1", override)


def test_a_plugin_registers_what_settings_then_name(losses: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(POLICY_LOSSES, "_entries", dict(POLICY_LOSSES._entries))
    (losses / "my.py").write_text(
        "from hwgrpo.catalog import POLICY_LOSSES\nimport losses\nPOLICY_LOSSES.register('twice')(losses.doubled)\n"
    )
    monkeypatch.syspath_prepend(str(losses))
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.name='twice'"):
        load("algorithm.loss.name=twice")
    assert build_loss(load("plugins=[my.py]", "algorithm.loss.name=twice").algorithm).scope == "sequence"


def test_a_plugin_that_fails_names_the_line(losses: Path):
    (losses / "broken.py").write_text("x = 1\nraise ValueError('not today')\n")
    with pytest.raises(ConfigError, match=r"plugins\.0='broken.py': .*ValueError: not today at .*broken.py:2"):
        load("plugins=[broken.py]")


def test_an_installed_package_offers_more_names_but_takes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[my.group]\nfast = acme_engines:FAST\nslow = acme_engines:FAST\n")
    (tmp_path / "acme_engines.py").write_text("FAST = 'fast'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    registry = Registry("engine", {"slow": "math:pi"}, group="my.group")
    assert registry.names() == ("fast", "slow")
    assert registry.load("fast") == "fast"
    assert registry.load("slow") > 3


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[my.group]\nfast = no_such_acme:FAST\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ConfigError, match=r"engine='fast': the package acme offers it as 'no_such_acme:FAST'"):
        Registry("engine", {}, group="my.group").load("fast")
