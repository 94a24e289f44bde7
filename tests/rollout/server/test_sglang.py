"""The engine on an SGLang server: what it sends, what it accepts, how it is started.

The server is fake: no real one has been asked. tests/vllm/test_uses.py looks its routes and fields up in SGLang's
sources.
"""

from pathlib import Path

import pytest
import torch

from hwgrpo.catalog import ENGINES
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.rollout.server import server_connection
from hwgrpo.rollout.server.engine import ServerEngine
from hwgrpo.values import Sampling
from tests.rollout.served import SAMPLING, TOKENIZER, batch, parts_for
from tests.rollout.server.fake_sglang import FakeSglang
from tests.support.models.tiny import settings
from tests.support.servers.fake_server import TOKEN, come_back

ROOT = Path(__file__).parents[3]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    server = FakeSglang()
    yield server
    server.close()


@pytest.fixture
def make(server, tmp_path):
    engines = []

    def make(*overrides: str, url: str | None = server.url) -> ServerEngine:
        parts = parts_for(url, tmp_path, "rollout.engine=sglang_server", *overrides)
        engines.append(ENGINES.load("sglang_server").make(parts))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_samples_come_back_in_order_with_their_logprobs_and_version(make):
    engine = make()
    engine.update_weights(7)
    found = engine.generate(batch("ab", "c"), SAMPLING)
    assert found.tokens.tolist() == [5, 6, 7] * 2
    assert found.offsets.tolist() == [0, 1, 3, 4, 6]
    assert found.logprobs.tolist() == [-0.5, -0.5, -1.5] * 2
    assert found.weight_version == 7


def test_every_sample_is_asked_for_with_its_own_seed_and_the_settings_of_sampling(make, server):
    engine = make()
    sampling = Sampling(n=3, max_response_tokens=4, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, stop=("x",))
    engine.generate(batch("ab", "c"), sampling)
    first = max(server.asked, key=lambda asked: len(asked["input_ids"][0]))
    assert first["input_ids"] == [TOKENIZER("ab").input_ids] * 3
    assert first["return_logprob"] is True
    wanted = {"max_new_tokens": 4, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "stop": ["x"]}
    for asked in first["sampling_params"]:
        assert wanted.items() <= asked.items()
        assert TOKENIZER.eos_token_id in asked["stop_token_ids"]
        assert not asked.get("ignore_eos"), "it would not look at the stop tokens"
    seeds = {asked["sampling_seed"] for request in server.asked for asked in request["sampling_params"]}
    assert len(seeds) == 6


def test_one_greedy_sample_without_filters_stands_for_all(make, server):
    engine = make()
    found = engine.generate(batch("ab"), Sampling(n=3, max_response_tokens=2, top_k=5, greedy=True))
    assert found.tokens.tolist() == [5, 5, 5]
    (asked,) = server.asked[0]["sampling_params"]
    assert (asked["temperature"], asked["top_k"], asked["top_p"], asked["min_p"]) == (0.0, -1, 1.0, 0.0)


def test_the_server_gets_the_weights_of_every_version(make, server, tmp_path):
    engine = make()
    for version in (1, 2):
        with torch.no_grad():
            engine._parts.model.model.norm.weight.fill_(float(version))
        engine.update_weights(version)
        assert server.weights["model.norm.weight"].eq(version).all()
        assert [path.name for path in (tmp_path / "weights").glob("*/*")] == [f"version-{version:08d}"]
    assert server.taken == [0, 1, 2]


def with_sample(**changes):
    def change(answer):
        answer[0] |= {key: value for key, value in changes.items() if key == "output_ids"}
        answer[0]["meta_info"] |= {key: value for key, value in changes.items() if key != "output_ids"}
        return answer

    return change


FAULTS = {
    "a dropped connection": "drop",
    "no JSON": "not json",
    "an internal error": "status 500",
    "a missing sample": lambda answer: answer[1:],
    "an error": lambda answer: {"error": {"message": "busy"}},
    "older weights": with_sample(weight_version="3"),
    "several weights": with_sample(weight_versions=[{"version": "0"}, {"version": "1"}]),
    "a sample broken off": with_sample(finish_reason={"type": "abort", "message": "Aborted"}),
    "log-probs of other tokens": with_sample(output_token_logprobs=[[-0.5, 9, None]]),
    "no log-probs": with_sample(output_token_logprobs=None),
    "a log-prob that is NaN": with_sample(output_token_logprobs=[[float("nan"), 5, None]]),
    "a token out of the vocabulary": with_sample(output_ids=[10**6], output_token_logprobs=[[-0.5, 10**6, None]]),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_after_one_bad_answer_the_request_is_sent_again(make, server, fault):
    engine = make()
    server.faults = [fault]
    assert engine.generate(batch("ab"), SAMPLING).tokens.tolist() == [5, 6, 7]
    assert len(server.asked) == 2
    assert engine.metrics["rollout/server_retries"] == 1


def test_a_server_that_comes_back_without_weights_gets_the_current_ones_and_the_request(make, server):
    engine = make()
    engine.update_weights(3)
    thread, back = come_back(server, after=1.0)
    try:
        found = engine.generate(batch("ab", "c", "d"), SAMPLING)
    finally:
        thread.join()
        back[0].close()
    assert found.tokens.tolist() == [5, 6, 7] * 3
    assert back[0].taken == [3]


@pytest.mark.parametrize("fault", ["weights", "weights, politely"])
def test_weights_that_it_does_not_take_are_sent_again(make, server, fault: str):
    engine = make()
    server.faults = [fault]
    engine.update_weights(1)
    assert server.taken == [0, 1]
    engine.close()
    strict = make("rollout.server.retries=0", "rollout.server.start_timeout=2")
    server.faults = [fault]
    with pytest.raises(RunError, match=r"did not apply weights 2: .*Rolling back"):
        strict.update_weights(2)


def test_it_is_not_put_to_sleep(make):
    with pytest.raises(
        ConfigError, match=r"rollout\.sleep_mode='always' has no effect with rollout\.engine='sglang_server'"
    ):
        make("rollout.sleep_mode=always")


def test_a_wrong_key_is_refused_and_appears_in_no_message(make, monkeypatch):
    monkeypatch.setenv("THE_TOKEN", "wrong-token")
    monkeypatch.setattr(server_connection, "REFUSAL_TIMEOUT", 0.2)
    with pytest.raises(ConfigError, match=r"refuses the token.*launch_server") as error:
        make()
    assert "wrong-token" not in str(error.value)


def run_of(make, tmp_path: Path, name: str, *overrides: str) -> ServerEngine:
    return make(f"trainer.output_dir={tmp_path / name}", f"rollout.server.weights_dir={tmp_path / name}", *overrides)


def test_a_second_run_is_refused_by_name_until_the_first_has_left_or_it_takes_the_server(make, server, tmp_path: Path):
    first = run_of(make, tmp_path, "one")
    with pytest.raises(ConfigError, match=r"in use by another run: .*/one .*take_over=true takes it"):
        run_of(make, tmp_path, "two")
    assert first.generate(batch("ab"), SAMPLING).weight_version == 0
    first.close()
    assert server.label == "free"
    second = run_of(make, tmp_path, "two")
    third = run_of(make, tmp_path, "three", "rollout.server.take_over=true")
    with pytest.raises(RunError, match=r"belongs to another run now: .*/three"):
        second.update_weights(1)
    with pytest.raises(RunError, match=r"belongs to another run now: .*/three"):
        second.generate(batch("ab"), SAMPLING)
    second.close()
    assert third.generate(batch("ab"), SAMPLING).weight_version == 0, "who has lost a server does not set it free"
    assert server.taken == [0, 0, 0]


def test_two_runs_that_come_at_the_same_moment_do_not_use_each_others_responses(make, server, tmp_path: Path):
    first = run_of(make, tmp_path, "one")
    label, server.label = server.label, "default"
    second = run_of(make, tmp_path, "two")
    assert second.generate(batch("ab"), SAMPLING).weight_version == 0
    assert server.label != label
    with pytest.raises(RunError, match=r"belongs to another run now: .*/two"):
        first.generate(batch("ab"), SAMPLING)


def test_a_note_says_that_no_real_server_has_been_met(make):
    (place, way) = make().notes
    assert "never run with a real SGLang server" in place
    assert way.endswith("through a folder")


STUB = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "backends")!r}, {str(ROOT / "kernels")!r}]
from sglang.srt.server_args import prepare_server_args
if __name__ == "__main__":
    from tests.rollout.server import fake_sglang
    print(f"argv={{sys.argv}}", flush=True)
    server_args = prepare_server_args(sys.argv[1:])
    print(f"{{server_args=}}", flush=True)
    fake_sglang.serve(server_args)
"""
SERVER_ARGS = (
    "def prepare_server_args(argv):\n"
    "    from tests.rollout.server import fake_sglang\n"
    "    return fake_sglang.prepare_server_args(argv)\n"
)


def test_a_server_is_started_with_its_key_in_no_command_line_ends_with_the_run_and_is_started_again(
    make, tmp_path: Path, monkeypatch
):
    monkeypatch.delenv("THE_TOKEN")
    stub = tmp_path / "stub" / "sglang"
    stub.mkdir(parents=True)
    (stub / "__init__.py").touch()
    (stub / "launch_server.py").write_text(STUB)
    (stub / "srt").mkdir()
    (stub / "srt/__init__.py").touch()
    (stub / "srt/server_args.py").write_text(SERVER_ARGS)
    engine = make(f"rollout.server.env={{PYTHONPATH: {stub.parent}}}", "rollout.server.start_timeout=90", url=None)
    process = engine._servers[0].connection.process
    assert process is not None
    number = process._process.pid  # pyright: ignore
    command = Path(f"/proc/{number}/cmdline").read_bytes().decode()
    assert engine._servers[0].client.token not in command
    log = (tmp_path / "run/rollout-server.log").read_text()
    assert "argv=['" in log
    assert "api_key='***'" in log
    assert engine._servers[0].client.token not in log
    assert "--load-format\0dummy" in command
    engine.update_weights(5)
    process._process.kill()  # pyright: ignore
    assert engine.generate(batch("ab"), SAMPLING).weight_version == 5
    assert engine.metrics["rollout/server_restarts"] == 1
    again = process._process  # pyright: ignore
    assert again is not None
    again.stdin.close()  # as when the run is gone
    again.wait(20)


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        settings("rollout.engine=sglang_server", *overrides)
    return str(error.value)


def test_settings_that_it_has_no_use_for_are_refused():
    assert "model.lora.rank=4" in refused("model.lora.rank=4")
    assert "rollout.kv_cache_gb=1" in refused("rollout.kv_cache_gb=1")
    assert "rollout.server.transfer='group'" in refused("rollout.server.transfer=group")
    assert "rollout.graphs=true" in refused("rollout.graphs=true")
