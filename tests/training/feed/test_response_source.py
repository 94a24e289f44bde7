"""Responses that are generated ahead: in what order, how old at the most, and what becomes of failures."""

import threading
from types import SimpleNamespace

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device

from hwgrpo.config import load_config
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.rollout.pause_gate import Gate, Stopped
from hwgrpo.training import setup
from hwgrpo.training.feed.collector import DrawnGroups
from hwgrpo.training.feed.on_demand import OnDemand, on_demand
from hwgrpo.training.feed.prefetcher import Prefetcher
from hwgrpo.training.feed.response_source import Batch, PrefetchedBatch
from hwgrpo.training.strategies.single import Single
from hwgrpo.values import Completions, Sampling
from tests.support.runs import runs

AHEAD = ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate", "trainer.validate_every=2")


class Lagging(OnDemand):
    """One-step-off policy with nothing beside anything: the next step's responses before this step is trained."""

    next_one = None

    def next(self, step):
        batch = self.next_one or super().next(step)
        self.next_one = super().next(step + 1)
        return batch


def without(names: tuple[str, ...], lines: list[dict]) -> list[dict]:
    return [{key: value for key, value in line.items() if not key.startswith(names)} for line in lines]


def test_one_step_ahead_is_what_the_same_order_gives_without_a_thread(tmp_path, monkeypatch):
    runs.run(tmp_path / "ahead", *AHEAD)

    def lagging(parts):
        return Lagging(**vars(on_demand(parts)))

    monkeypatch.setattr(setup, "make_source", lagging)
    runs.run(tmp_path / "lagging", *AHEAD)
    ahead, turns = runs.metrics(tmp_path / "ahead"), runs.metrics(tmp_path / "lagging")
    assert without(("rollout/staleness",), ahead) == turns
    stale = [line["rollout/staleness_max"] for line in ahead if "rollout/staleness_max" in line]
    assert stale == [0, 1, 1, 1, 1, 1]
    gaps = [line["rollout_corr/k3_kl"] for line in ahead if "rollout_corr/k3_kl" in line]
    assert gaps[0] < 1e-9 < min(gaps[1:]), "the policy has moved since"


def test_batches_that_wait_are_handed_out_first_and_the_position_in_the_data_is_theirs():
    source = Source()
    before, batches = source.state(), []
    for _ in range(2):
        prompts = source.next()
        nothing = torch.zeros(0, dtype=torch.int64)
        completions = Completions(nothing, nothing, nothing, nothing.float(), nothing.bool(), (), 0)
        batches.append(PrefetchedBatch(Batch(prompts, completions, {}), source.state()))
    responses = ahead(2, source=source, prefetched=batches, state=before)
    responses._engine.may.release(100)
    assert [each.batch.prompts for each in responses._done] == [1, 2]
    assert responses.state() == {"position": 0}
    for step in (1, 2, 3):
        assert responses.next(step).prompts == step
        assert responses.state() == {"position": step}
        responses.update_weights(step)
    responses.close()


class Source:
    """Draws numbers; the position is how many were drawn."""

    world_size, rank = 1, 0
    sampler = SimpleNamespace(metrics={})

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> int:
        self.position += 1
        return self.position

    def state(self) -> dict:
        return {"position": self.position}


class Engine:
    """Says which weights it has, and waits before each batch until it may."""

    def __init__(self) -> None:
        self.version = 0
        self.metrics = {"perf/rollout_tokens_per_second": 1.0}
        self.generated: list[tuple[int, int]] = []
        self.may = threading.Semaphore(0)

    def generate(self, prompts: int, sampling: Sampling) -> Completions:
        assert self.may.acquire(timeout=60)
        self.generated.append((prompts, self.version))
        if prompts < 0:
            raise RunError("cannot answer")
        nothing = torch.zeros(0, dtype=torch.int64)
        return Completions(nothing, nothing, nothing, nothing.float(), nothing.bool(), (), self.version)

    def update_weights(self, version: int) -> None:
        self.version = version


def ahead(bound: int, last_step: int = 9, source=None, **waiting) -> Prefetcher:
    engine, source = Engine(), source or Source()
    gate, device = Gate(), Device(BACKEND)
    parts = SimpleNamespace(prompts=source, engine=engine, config=load_config("tiny_sort"), total_steps=last_step)
    collector = DrawnGroups(parts, Single.__new__(Single))  # type: ignore[arg-type]
    return Prefetcher(
        collector,
        source,
        engine,
        gate,
        device,
        max_staleness=bound,
        first_step=1,
        last_step=last_step,
        **waiting,
    )


def settle(responses: Prefetcher, generated: int) -> None:
    """Wait until that many batches are generated, then see that no other one is begun."""
    engine = responses._engine
    for _ in range(1000):
        if len(engine.generated) >= generated:
            break
        threading.Event().wait(0.01)
    threading.Event().wait(0.1)
    assert len(engine.generated) == generated


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_no_batch_is_begun_before_there_are_weights_that_will_be_new_enough(bound):
    responses = ahead(bound)
    responses._engine.may.release(100)
    assert responses.next(1).completions.weight_version == 0
    settle(responses, 1 + bound)  # steps 1 to 1 + bound may be of version 0
    for step in range(1, 5):
        responses.update_weights(step)
        settle(responses, min(1 + bound + step, 9))
        batch = responses.next(step + 1)
        assert batch.prompts == step + 1
        assert batch.metrics["rollout/staleness_max"] == step - batch.completions.weight_version <= bound
    assert all(prompt - 1 - version <= bound for prompt, version in responses._engine.generated)
    assert max(prompt - 1 - version for prompt, version in responses._engine.generated) == bound, "the bound is used"
    responses.close()


def test_a_lower_bound_counts_from_the_batch_after_the_one_in_flight_and_is_withdrawn_likewise():
    responses = ahead(1, last_step=12)
    responses._engine.may.release(100)
    ages = []
    for step in range(1, 12):
        batch = responses.next(step)
        ages.append(batch.metrics["rollout/staleness_max"])
        if step == 3:
            responses.limit_staleness(0, step + 2)
        if step == 7:
            responses.limit_staleness(1, step + 2)
        responses.update_weights(step)
    assert ages == [0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]
    responses.close()


def test_the_bound_of_the_settings_is_never_raised():
    responses = ahead(1)
    responses.limit_staleness(5, 2)
    responses._engine.may.release(100)
    responses.next(1)
    settle(responses, 2)
    responses.close()


def test_a_batch_of_weights_that_are_too_old_is_generated_again_with_the_policys():
    responses = ahead(1)
    responses._engine.may.release(100)
    responses.next(1)
    settle(responses, 2)
    responses.update_weights(1)
    responses._engine.version = -3  # what came back after a fault
    settle(responses, 3)
    responses.next(2)
    responses.update_weights(2)
    batch = responses.next(3)
    assert batch.completions.weight_version == 2
    assert [prompt for prompt, _ in responses._engine.generated].count(3) == 2
    responses.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_takes_no_new_weights_ends_the_run(ranks):
    """One of several ranks cannot bring weights alone."""
    responses = ahead(1)
    responses._source.world_size = ranks
    responses._engine.may.release(100)
    responses._engine.update_weights = lambda version: None
    for step in (1, 2):
        responses.next(step)
        settle(responses, step + 1)
        responses.update_weights(step)
    with pytest.raises(RunError, match=r"step 3 were sampled with weights 0, but the policy has weights 2"):
        responses.next(3)
    responses.close()


def test_new_weights_wait_for_the_batch_that_is_being_sampled():
    class Slow(Source):
        def next(self) -> int:
            threading.Event().wait(0.3 * (self.position == 1))
            return super().next()

    responses = ahead(1, source=Slow())
    responses._engine.may.release(1)
    responses.next(1)  # returns when step 2 is begun, which may not go on yet
    brought = threading.Thread(target=responses.update_weights, args=(1,))
    brought.start()
    brought.join(0.2)
    assert brought.is_alive()
    assert responses._engine.version == 0
    responses._engine.may.release(100)
    brought.join(60)
    assert responses._engine.generated[:2] == [(1, 0), (2, 0)]
    responses.close()


def test_the_position_in_the_data_is_that_of_what_was_handed_out():
    responses = ahead(3)
    responses._engine.may.release(100)
    assert responses.state() == {"position": 0}
    responses.next(1)
    settle(responses, 4)
    assert responses.state() == {"position": 1}
    responses.close()


def test_nothing_is_generated_beyond_the_last_step():
    responses = ahead(3, last_step=2)
    responses._engine.may.release(100)
    responses.next(1)
    responses.next(2)
    settle(responses, 2)
    responses.close()


def test_a_failure_of_the_thread_is_raised_where_its_batch_is_asked_for():
    class Broken(Source):
        def next(self):
            return -super().next() if self.position else super().next()

    responses = ahead(1, source=Broken())
    responses._engine.may.release(100)
    assert responses.next(1).prompts == 1
    with pytest.raises(RunError, match="cannot answer"):
        responses.next(2)
    responses.close()


def test_closing_ends_the_thread_and_who_waits_for_it():
    responses = ahead(1)
    responses._engine.may.release(1)
    responses.next(1)
    responses._engine.may.release(100)
    responses.close()
    assert not responses._thread.is_alive()
    with pytest.raises(Stopped):
        responses.next(2)


def test_new_weights_come_amid_responses_and_each_token_tells_its_version(tmp_path):
    """The same weights under a new number: tokens and log-probs are as without, only the versions differ."""
    words = ("rollout.max_staleness=1", "rollout.partial=true", "algorithm.correction.name=token_truncate")
    words = (*words, "rollout.probe_every=0")
    run = setup.build_run(runs.small(tmp_path / "run", *words), BACKEND, 0, 1)
    engine, gate = run.engine, run.responses._gate
    assert isinstance(engine, LocalEngine)
    prompts = run.prompts.next()
    expected = engine.generate(prompts, run.sampling)
    assert expected.versions is None
    steps = []
    plain = gate.step

    def step() -> None:
        steps.append(1)
        if len(steps) == 3:  # before the forward that gives the third token
            engine.update_weights(7)
        plain()

    gate.step = step
    found = engine.generate(prompts, run.sampling)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.logprobs, expected.logprobs)
    position = torch.cat([torch.arange(n) for n in found.lengths.tolist()])
    assert found.versions is not None
    assert torch.equal(found.versions, torch.where(position < 2, 0, 7))
    assert (found.weight_version, found.newest_version) == (0, 7)
    run.close()


def test_a_run_with_weights_amid_responses_trains_and_says_that_it_cannot_be_repeated(tmp_path, capsys):
    runs.run(
        tmp_path / "run",
        *AHEAD,
        "rollout.max_staleness=2",
        "rollout.partial=true",
        "trainer.max_steps=8",
        "observe.progress=plain",
    )
    assert "neither a second run nor a resumed one gives the same numbers" in capsys.readouterr().out
    lines = [line for line in runs.metrics(tmp_path / "run") if "rollout/staleness_max" in line]
    assert len(lines) == 8
    assert all(line["rollout/staleness_min"] <= line["rollout/staleness_max"] <= 2 for line in lines)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rollout.max_staleness=1"], "set algorithm.correction.name, e.g. token_truncate"),
        (["rollout.partial=true"], "rollout.partial=true has no effect with rollout.max_staleness=0"),
        (["rollout.max_staleness=-1"], "rollout.max_staleness=-1 is out of range"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, words, told):
    with pytest.raises(ConfigError, match=told):
        runs.small(tmp_path, *words)


def test_an_engine_that_hangs_ends_the_run_after_the_time_limit():
    responses = ahead(1, timeout=0.2)
    with pytest.raises(RunError, match=r"waited 0.2 s for the responses of step 1: .*trainer.process_group_timeout"):
        responses.next(1)
    with pytest.raises(RunError, match=r"for the rollout thread to end"):
        responses.close()
    responses._engine.may.release()
