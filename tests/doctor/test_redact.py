"""Nothing secret is shown, and what is posted names neither home folder, host nor user."""

import pytest

from hwgrpo.doctor import diagnosis_markdown, redact
from hwgrpo.doctor.host_facts import gather_host
from hwgrpo.support import text
from hwgrpo.support.text import hide_secrets
from tests.support.devices.hosts import SOUND, cpu, diagnosis

SECRETS = {
    "HF_TOKEN": "hf_abcdefghijkl", "HF_HUB_TOKEN": "x1", "RAY_AUTH_COOKIE": "x2", "VLLM_API_KEY": "x3",
    "SLURM_JWT_SECRET": "x4", "TORCH_PASSWORD": "x5", "RAY_KEY": "x6", "NCCL_PRIVATE": "x7", "DS_APIKEYS": "x8",
}  # fmt: skip
HARMLESS = {
    "NCCL_DEBUG": "INFO", "HF_HOME": "/data/hf", "ASCEND_RT_VISIBLE_DEVICES": "0,1", "VLLM_KEYWORDS": "a",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def test_a_name_that_begins_like_a_token_is_shown():
    assert hide_secrets("unknown key hf_overrides, sk-learn-models: hf_abcDEF1234") == (
        "unknown key hf_overrides, sk-learn-models: hf_***"
    )


def test_a_token_and_a_registered_secret_may_be_parts_of_each_other(monkeypatch):
    monkeypatch.setattr(text, "_remembered", dict.fromkeys(("0123456789", "key hf_abcDEF55 of", "hf_GHI012345678")))
    shown = hide_secrets("hf_abcDEF0123456789, key hf_abcDEF55 of, hf_GHI012345678, hf_overrides")
    assert shown == "***, ***, ***, hf_overrides"


@pytest.mark.parametrize("name", [*SECRETS, "AWS_SECRET_ACCESS_KEY", "wandb_api_key", "GITHUB_PAT_TOKEN", "MY_PASSWD"])
def test_variables_whose_names_speak_of_secrets_lose_their_values(name):
    assert redact.variables({name: "value-1234"}) == {name: "(set, not shown)"}


def test_harmless_variables_keep_their_values():
    kept = {name: value for name, value in HARMLESS.items() if name != "TOKENIZERS_PARALLELISM"}
    assert redact.variables(kept) == kept


def test_an_empty_secret_is_shown_to_be_empty():
    assert redact.variables({"HF_TOKEN": ""}) == {"HF_TOKEN": ""}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://ada:s3cret@hub.example/x", "https://***@hub.example/x"),
        ("https://s3cret@hub.example/x", "https://***@hub.example/x"),
        ("see https://hub.example/x?access_token=abc&n=1", "see https://hub.example/x?access_token=***&n=1"),
        ("error: hf_ABCDEFGHIJKLMNOP is no token", "error: hf_*** is no token"),
        ("https://hub.example/a@b", "https://hub.example/a@b"),
        ("mail ada@example.org", "mail ada@example.org"),
    ],
)
def test_credentials_are_taken_out_of_texts(text, shown):
    assert hide_secrets(text) == shown


def test_what_is_posted_names_no_home_no_host_and_no_user():
    text = "/home/ada/run on node-17: /home/ada2 /home/adapter, ada (adagrad), node-170"
    assert redact.for_others(text, "/home/ada", "node-17", "ada") == (
        "~/run on HOST: /home/ada2 /home/adapter, USER (adagrad), node-170"
    )


def test_names_too_common_to_be_told_from_words_stay():
    assert redact.for_others("root of / on localhost", "/", "localhost", "root") == "root of / on localhost"


def test_gathered_variables_hold_no_secret_whatever_is_done_with_them():
    told = gather_host(environ={**SECRETS, **HARMLESS, "SSH_AUTH_SOCK": "/x", "HF_ENDPOINT": "https://u:p@h/"})
    assert "SSH_AUTH_SOCK" not in told.environment
    assert {told.environment[name] for name in SECRETS} == {"(set, not shown)"}
    assert told.environment["HF_ENDPOINT"] == "https://***@h/"
    assert told.environment["NCCL_DEBUG"] == "INFO"


def test_a_posted_report_is_markdown_whose_fences_hold(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr(diagnosis_markdown.platform, "node", lambda: "node-17")
    monkeypatch.setattr(diagnosis_markdown, "_user", lambda: "ada")
    environment = {"HF_HOME": "/home/ada/hf", "NCCL_DEBUG": "```\n# not a title"}
    text = diagnosis_markdown.markdown(diagnosis(cpu(scheduler="slurm job 3 on node-17"), host=SOUND.__class__(
        cache="/home/ada/.cache", environment=environment)))  # fmt: skip
    assert text.startswith("### hwgrpo doctor\n\n```text\n")
    assert text.count("```") == 6
    assert "~/.cache" in text
    assert "HF_HOME=~/hf" in text
    assert "node-17" not in text
    assert "ada" not in text
