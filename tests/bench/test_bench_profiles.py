"""Profiles of a decode step and of an update: they run what a training step runs, at the sizes that they name."""

from dataclasses import replace

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device

from hwgrpo.bench import decode_profile, update_profile
from hwgrpo.bench.decode_profile import DecodeProfile, profile_decode
from hwgrpo.bench.shaped_model import random_model, shape_of
from hwgrpo.bench.update_profile import WARM_UP, PassTimes, profile_update, random_batch
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.training.setup import build_run
from hwgrpo.training.update.policy_update import PolicyUpdate
from tests.support.models.tiny import tiny_qwen3
from tests.support.runs import runs

DEVICE = Device(BACKEND)


class Recording:
    """A recording of the host: a replay runs the work again."""

    made: list["Recording"]

    def __init__(self, work):
        self.work, self.output, self.replays, self.released = work, work(), 0, False
        self.made.append(self)

    def replay(self):
        self.replays += 1
        self.output = self.work()

    def release(self):
        self.released = True


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Recording, "made", [], raising=False)
    return Recording


def test_decode_steps_are_of_the_rows_and_capacities_that_they_name(recorder, monkeypatch):
    computed: set[tuple[int, int, int]] = set()
    original = LeanRows.compute

    def watched(self: LeanRows, token):
        logits = original(self, token)
        computed.add((len(logits), self._cache.capacity, 5 + int(self._cache._length[0]) - 1))
        return logits

    monkeypatch.setattr(LeanRows, "compute", watched)
    reports: list[int] = []
    found = profile_decode(
        tiny_qwen3().eval(), DEVICE, (16, 8), (80, 3), prompt_tokens=5, repeat=2, recorder=recorder,
        report=lambda found: reports.append(len(found.steps)),
    )  # fmt: skip
    sizes = [(rows, capacity) for rows in (8, 16) for capacity in (3, 80)]
    assert [(each.rows, each.capacity) for each in found.steps] == sizes
    # the newest token is the last that the buffers hold, after a prompt of 5 tokens
    assert computed == {(rows, capacity, 5 + capacity - 1) for rows, capacity in sizes}
    assert reports == [1, 2, 3, 4, 4]
    assert all(recording.released for recording in recorder.made)
    assert [recording.replays for recording in recorder.made] == [4, 4, 4, 4 + decode_profile.PROFILED]
    assert all(each.prefill_ms > 0 and each.launched_ms > 0 and (each.replay_ms or 0) > 0 for each in found.steps)
    assert set(found.draw_ms) == {"all tokens", "top_p", "top_k"}
    products = {each.name: each.calls for each in found.kernels}
    assert products["aten::bmm"] % decode_profile.PROFILED == 0


def test_without_a_recorder_steps_are_launched_only():
    found: DecodeProfile = profile_decode(tiny_qwen3().eval(), DEVICE, (8,), (2,), prompt_tokens=2, repeat=1)
    assert (found.steps[0].replay_ms, found.steps[0].record_ms) == (None, None)
    assert found.kernels


@pytest.fixture(scope="module")
def update(tmp_path_factory):
    run = build_run(runs.small(tmp_path_factory.mktemp("profile"), "rollout.n=2"), BACKEND, 0, 1)
    yield run.update
    run.close()


def test_passes_leave_no_gradient_and_no_weight_changed_and_say_which_layout_is_impossible(update, monkeypatch):
    before = [parameter.detach().clone() for parameter in update.policy.parameters()]
    seen: list[tuple[str, bool, int, bool]] = []
    original, scored = PolicyUpdate.accumulate_gradients, PolicyUpdate.score

    def gradient(self: PolicyUpdate, batch, sequences):
        seen.append((self.layout.name, torch.backends.cuda.cudnn_sdp_enabled(), len(batch.tokens), True))
        return original(self, batch, sequences)

    def score(self: PolicyUpdate, batch):
        seen.append((self.layout.name, torch.backends.cuda.cudnn_sdp_enabled(), len(batch.tokens), False))
        return scored(self, batch)

    monkeypatch.setattr(PolicyUpdate, "accumulate_gradients", gradient)
    monkeypatch.setattr(PolicyUpdate, "score", score)
    possible = update_profile.possible_layout
    monkeypatch.setattr(
        update_profile,
        "possible_layout",
        lambda update, device, name: (
            (None, "no such attention") if name == "packed" else possible(update, device, name)
        ),
    )
    allowed_before = torch.backends.cuda.cudnn_sdp_enabled()
    reports: list[list[PassTimes]] = []
    found = profile_update(
        update, DEVICE, layouts=("padded", "packed"), groups=2, prompt_tokens=3, response_tokens=9, repeat=2, ragged=2,
        report=lambda found: reports.append([*found]),
    )  # fmt: skip
    assert torch.backends.cuda.cudnn_sdp_enabled() == allowed_before
    assert [(each.layout, each.cudnn, each.reason) for each in found] == [
        ("padded", True, ""), ("packed", True, "no such attention"),
        ("padded", False, ""), ("packed", False, "no such attention"),
    ]  # fmt: skip
    assert [len(each) for each in reports] == [1, 2, 3, 4]
    assert [bool(each.kernels) for each in found] == [False, False, True, False]
    warm_up, equal, *ragged = (len(random_batch(2, 2, 3, 9, 20, seed).tokens) for seed in (WARM_UP, None, 1, 2, 3, 4))
    assert len({equal, *ragged}) == 5, "lengths of one round are new in the next"
    for number, allowed in enumerate((True, False)):
        first, second = ragged[2 * number : 2 * number + 2]
        passes = [*[(equal, True)] * 3, *[(equal, False)] * 3, *[(first, True)] * 2, *[(second, True)] * 2]
        passes += [] if allowed else [(equal, True)]
        round_of = seen[: len(passes) + 1]
        assert round_of == [("padded", False, warm_up, True), *(("padded", allowed, *each) for each in passes)]
        del seen[: len(round_of)]
    assert not seen
    assert [len(each.ragged_new_ms) + len(each.ragged_again_ms) for each in found] == [4, 0, 4, 0]
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in update.policy.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, update.policy.parameters(), strict=True))


def test_a_layout_that_the_device_cannot_run_is_named_and_the_next_is_measured(update, monkeypatch):
    def out_of_memory(self: PolicyUpdate, batch):
        raise RuntimeError("no memory\nand more lines")

    with monkeypatch.context() as patch:
        patch.setattr(PolicyUpdate, "score", out_of_memory)
        found = profile_update(update, DEVICE, layouts=("padded",), cudnn=(False,), groups=1, response_tokens=2)
    assert found[0].reason == "RuntimeError: no memory"
    assert found[0].first_ms is not None


def test_a_batch_without_a_seed_has_equal_lengths_and_any_batch_has_both_signs_of_advantages():
    batch = random_batch(3, 2, 4, 6, 11)
    assert batch.lengths.tolist() == [6] * 6
    assert batch.prompt_offsets.tolist() == [0, 4, 8, 12]
    ragged = random_batch(3, 2, 4, 6, 11, seed=1)
    assert all(2 <= length <= 6 for length in ragged.lengths.tolist())
    assert len(set(ragged.lengths.tolist())) > 1
    assert ragged.advantages.tolist() == [1.0, -1.0] * 3
    assert int(ragged.tokens.max()) < 11
    assert replace(ragged, old_logprobs=torch.zeros(len(ragged.tokens))).old_logprobs is not None


def test_a_random_model_has_the_architecture_of_its_shape():
    config = shape_of("configs/models/Qwen2.5-0.5B.json", tiny=True)
    model = random_model(config, torch.device("cpu"))
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    full = shape_of("configs/models/Qwen2.5-0.5B.json")
    assert (full.num_hidden_layers, full.vocab_size, config.num_hidden_layers) == (24, 151936, 2)
