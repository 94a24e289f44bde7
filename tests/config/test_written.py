"""What comes from variables and may be secret is stored as it was written; everything else as what it is."""

import copy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hwgrpo.config import load_config
from hwgrpo.config.load import to_yaml, unset_variables
from hwgrpo.config.stored_settings import settings_from
from hwgrpo.config.written_config import changed_values, digests, written_of
from hwgrpo.config.yaml_text import read_yaml, write_yaml
from hwgrpo.errors import ConfigError
from hwgrpo.support.text import HIDDEN, block, hide_secrets, one_line

SECRET = "planted-0123-value"
HERE = Path(__file__)
ROWS = HERE.parents[1] / "support/runs/deepspeed.json"  # any file will do
BASE = ("model.path=builtin://tiny", f"data.train={ROWS}")
EXACT = "reward.functions=[exact_match]"


def load(*words: str, **more):
    return load_config(None, [*BASE, *words], **more)


def reward(kwargs: str) -> str:
    return f"reward.functions=[{{name: exact_match, kwargs: {kwargs}}}]"


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLANTED", SECRET)
    monkeypatch.delenv("ABSENT", raising=False)


SERVER = ("rollout.engine=vllm_server", EXACT)
ARGUMENTS = """{
    plain: '${oc.env:PLANTED}', nested: {x: 'Bearer ${oc.env:PLANTED}'}, listed: [a, '${oc.env:PLANTED}'],
    decoded: '${oc.decode:${oc.env:PLANTED}}', same: '${reward.functions.0.kwargs.plain}',
    default: '${oc.env:ABSENT,${oc.env:PLANTED}}'}"""
STORED = {
    "arguments of a reward": [reward(ARGUMENTS)],
    "all arguments of a reward": [reward("'${oc.decode:${oc.env:AS_MAP}}'")],
    "an override": [EXACT, "reward.functions.0.kwargs.judge=${oc.env:PLANTED}"],
    "arguments of a server": [
        *SERVER,
        "rollout.server.env={A: '${oc.env:PLANTED}'}",
        "rollout.engine_kwargs={hf_token: '${oc.env:PLANTED}'}",
    ],
    "a URL's password": [*SERVER, "rollout.server.url='http://ada:${oc.env:PLANTED}@host:80'"],
    "a whole URL": [*SERVER, "rollout.server.url=${oc.env:AS_URL}"],
    "a URL's query": [*SERVER, "rollout.server.url='http://host?api_key=${oc.env:PLANTED}'"],
    "texts that refer to one": [
        reward("{judge: '${oc.env:PLANTED}'}"),
        "data.system_prompt='${reward.functions.0.kwargs.judge}'",
        "data.ground_truth_key='${oc.select:reward.functions.0.kwargs.judge}'",
    ],
}


@pytest.mark.parametrize("words", STORED.values(), ids=STORED.keys())
def test_a_value_that_may_be_secret_is_stored_as_it_was_written_and_read_back(words, monkeypatch):
    monkeypatch.setenv("AS_MAP", f"{{judge: {SECRET}}}")
    monkeypatch.setenv("AS_URL", f"https://ada:{SECRET}@host:80")
    config = load(*words)
    stored = to_yaml(config)
    assert SECRET in str(config), "the run itself has the value"
    for text in (stored, to_yaml(config, shown=True)):
        assert SECRET not in text
        assert "${" in text
    assert settings_from(stored) == config
    for name in ("PLANTED", "AS_MAP", "AS_URL"):
        monkeypatch.delenv(name, raising=False)
    assert to_yaml(settings_from(stored)) == stored, "it is passed on by commands that do not have the variable"


def test_other_settings_are_stored_as_what_they_were_resolved_to(monkeypatch):
    monkeypatch.setenv("MODEL", "builtin://tiny?task=sort")
    config = load("model.path=${oc.env:MODEL}", reward("{n: '${rollout.n}', path: '${model.path}'}"))
    stored = to_yaml(config)
    monkeypatch.setenv("MODEL", "another")
    assert "${" not in stored
    assert settings_from(stored) == config


@pytest.mark.parametrize("text", ["a ${b} c", "\\${b}", "${", "\\\\${oc.env:PLANTED}", "$ {b}"])
def test_a_text_that_looks_like_an_interpolation_stays_that_text(text):
    config = load(EXACT)
    config.data.system_prompt = text
    config.reward.functions[0].kwargs["pattern"] = text
    assert settings_from(to_yaml(config)) == config


def test_a_value_that_was_changed_after_loading_is_stored_as_it_is():
    config = copy.deepcopy(load(reward("{judge: '${oc.env:PLANTED}'}")))
    assert "${oc.env:PLANTED}" in to_yaml(config)
    config.reward.functions[0].kwargs["judge"] = "other"
    assert "judge: other" in to_yaml(config)


UNSET = {
    reward("{judge: '${oc.env:ABSENT}'}"): lambda c: c.reward.functions[0].kwargs == {"judge": None},
    reward("'${oc.decode:${oc.env:ABSENT}}'"): lambda c: c.reward.functions[0].kwargs == {},
    "rollout.server.env={A: '${oc.env:ABSENT}', B: b}": lambda c: c.rollout.server.env == {"B": "b"},
    "rollout.server.url='http://u:${oc.env:ABSENT}@host'": lambda c: c.rollout.server.url == "http://host",
    "rollout.server.url=${oc.env:ABSENT}": lambda c: c.rollout.server.url is None,
}


@pytest.mark.parametrize("word", UNSET)
def test_a_variable_that_is_not_set_is_an_error_that_names_it_unless_it_may_be_missing(word):
    words = [*(SERVER if "server" in word else ()), word]
    with pytest.raises(ConfigError, match="the environment variable ABSENT is not set; export it"):
        load(*words)
    config = load(*words, variables_may_be_missing=True)
    assert UNSET[word](config)
    assert set(unset_variables(config).values()) == {"ABSENT"}
    assert "${oc.env:ABSENT}" in to_yaml(config)


def test_a_setting_that_is_needed_is_an_error_without_its_variable_in_any_case():
    with pytest.raises(ConfigError, match=r"model\.path='\$\{oc\.env:ABSENT\}': the environment variable ABSENT"):
        load(EXACT, "model.path=${oc.env:ABSENT}", variables_may_be_missing=True)


def test_an_error_about_a_value_shows_it_as_it_was_written():
    for word in ("rollout.n=${oc.env:PLANTED}", "rollout.n=${oc.decode:'{${oc.env:PLANTED}'}"):
        with pytest.raises(ConfigError) as error:
            load(EXACT, word)
        assert "${oc." in str(error.value)
        assert SECRET not in str(error.value)


def test_digests_show_a_change_and_neither_the_value_nor_that_two_are_equal(monkeypatch):
    words = reward("{a: '${oc.env:PLANTED}', b: '${oc.env:PLANTED}', n: '${oc.decode:${oc.env:PIN}}'}")
    monkeypatch.setenv("PIN", "1234")
    config = load(words)
    saved = digests(written_of(config))
    assert len(set(saved.values())) == 3
    assert not any(SECRET in digest or "1234" in digest for digest in saved.values())
    assert changed_values(saved, written_of(config)) == []
    monkeypatch.setenv("PIN", "1235")
    assert changed_values(saved, written_of(load(words))) == ["reward.functions.0.kwargs.n"]
    assert changed_values({}, written_of(config)) == [], "a checkpoint of before knows of none"


def test_secrets_that_were_typed_are_kept_in_the_run_and_not_shown():
    words = (
        reward("{api_key: typed-1, auth: {user: typed-2}, max_tokens: 5, keyword: x, url: 'http://a:typed-3@h'}"),
        "data.prompt_key=question",
    )
    config = load(*words)
    assert settings_from(to_yaml(config)) == config
    shown = to_yaml(config, shown=True)
    assert "typed-" not in shown
    assert shown.count(HIDDEN) == 2
    assert "max_tokens: 5" in shown
    assert "prompt_key: question" in shown
    with pytest.raises(ConfigError, match=r"kwargs\.api_key='\(set, not shown\)': it was left out"):
        load_config(None, [*BASE, reward(f"{{api_key: '{HIDDEN}'}}")])


def test_a_typed_secret_that_is_no_yaml_is_an_error_that_does_not_show_it():
    with pytest.raises(ConfigError, match=r"kwargs\.api_key=\(set, not shown\) is not valid YAML") as error:
        load(EXACT, "reward.functions.0.kwargs.api_key=[typed-4")
    assert "typed-4" not in str(error.value)


def test_messages_lose_loaded_secrets_and_keep_what_is_none(monkeypatch):
    monkeypatch.setenv("CACHE", "/data/some/folder")
    monkeypatch.setenv("MY_TOKEN", "to/ken")
    load(
        reward("{judge: '${oc.env:PLANTED}', cache: '${oc.env:CACHE}', x: '${oc.env:MY_TOKEN}', n: '${oc.env:N,7}'}"),
    )
    assert hide_secrets(f"401 for {SECRET} and {SECRET!r}") == "401 for *** and '***'"
    assert hide_secrets("https://h/?q=to%2Fken, to/ken") == "https://h/?q=***, ***"
    assert hide_secrets("7 files in /data/some/folder") == "7 files in /data/some/folder"


def test_texts_of_others_cannot_steer_a_terminal():
    text = "a\x1b[2Jb\nhwgrpo: error: c\td\u202ee"
    assert one_line(text) == "a·[2Jb↵hwgrpo: error: c·d·e"
    assert block(text) == "a·[2Jb\n  hwgrpo: error: c·d·e"


TEXTS = (
    "1e-3", "1e5", "nan", "1_000", " 5", "010", "1:30", "0x1F", "y", "N", "yes", "~", "", "null", "2024-01-01", "${x}",
    "a: b", "é\n", "#", "- a", "'", '"', "<<", "=",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_written_text_is_read_back_as_text_by_this_project_and_by_others(text: str):
    tree = {"key": text, "list": [text, text], "other": [1, 2.5, 1e-6, float("inf"), True, None, {}, []]}
    written = write_yaml(tree)
    assert written == OmegaConf.to_yaml(OmegaConf.create(tree))
    assert read_yaml(written, "", Any) == tree


def test_containers_that_are_used_twice_are_written_twice():
    shared = {"a": [1]}
    assert write_yaml({"x": shared, "z": shared}) == "x:\n  a:\n  - 1\nz:\n  a:\n  - 1\n"
