"""Prompts with images for vLLM: what the trainer sends, what the plugin makes of it, and replies that are wrong."""

import asyncio
import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.errors import ConfigError
from hwgrpo.models.placeholders import placeholder_ids
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.policy_weights import ModuleWeights
from hwgrpo.rollout.requests import Request, make_requests
from hwgrpo.rollout.server.http_client import InvalidResponse
from hwgrpo.rollout.server.server_api import ScoreRequest, ServerRequest
from hwgrpo.rollout.server.vllm import ImageSettings, VllmServer
from hwgrpo.rollout.vllm.vllm_requests import parts_of
from hwgrpo.rollout.vllm.vllm_settings import check_images, engine_arguments, sent_weights
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import IMAGES_ROUTE, VERSION_HEADER, WEIGHTS_ROUTE, Images
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.engine_images import engine_prompt, places, until_disconnect
from hwgrpo.training.vision_checks import check_engine_reads_images
from hwgrpo.values import Prompt, PromptBatch, Sampling
from tests.rollout.served import parts_for
from tests.rollout.server import test_vllm_plugin as plugin_tests
from tests.support.models.tiny import settings, tiny_qwen3
from tests.support.models.vision_families import IMAGE, VIDEO, VISION_FAMILIES, model_of

guard = plugin_tests.guard
FAMILY = VISION_FAMILIES["Qwen2-VL"]
SAMPLING = Sampling(n=2, max_response_tokens=3, stop=("x",))
LATER = Images("later", IMAGE, {"pixel_values": torch.zeros(8, 96), "image_grid_thw": torch.tensor([[1, 2, 4]])})
"""An image of two tokens."""


def shown(seed: int, images: int = 1) -> Prompt:
    ids, made = FAMILY.prompt(seed, images)
    return Prompt(f"{seed}", "", tuple(ids), None, {}, images=made)


def images_of(prompt: Prompt) -> list[Images]:
    assert prompt.images is not None
    return parts_of(prompt.images)


@pytest.fixture
def engine_inputs(monkeypatch):
    """Stand in for the parts of vLLM that make its inputs: each returns its arguments."""
    fields = SimpleNamespace(
        flat_from_sizes=lambda kind, sizes: ("flat", kind, sizes.tolist()),
        batched=lambda kind, keep_on_cpu: ("batched", kind, keep_on_cpu),
    )
    items = SimpleNamespace(from_hf_inputs=lambda tensors, of: {name: (tensors[name], of[name]) for name in of})
    inputs = SimpleNamespace(MultiModalFieldConfig=fields, MultiModalKwargsItems=items)
    inputs.PlaceholderRange = lambda offset, length: (offset, length)
    monkeypatch.setitem(sys.modules, "vllm.multimodal.inputs", inputs)
    monkeypatch.setitem(sys.modules, "vllm.inputs", SimpleNamespace(mm_input=lambda **made: made))


@pytest.mark.parametrize("images", [1, 2, 4])
def test_each_image_stands_where_its_tokens_are(images):
    prompt = shown(3, images)
    found = places(prompt.token_ids, images_of(prompt))
    assert len(found) == images
    assert [i for start, length in found for i in range(start, start + length)] == [
        i for i, token in enumerate(prompt.token_ids) if token == IMAGE
    ]


def test_images_of_several_turns_may_stand_next_to_each_other():
    prompt = shown(1)
    tokens = [*prompt.token_ids, 5, IMAGE, IMAGE, IMAGE, IMAGE]
    *_, first, second = places(tokens, [*images_of(prompt), LATER, LATER])
    assert (first, second) == ((len(tokens) - 4, 2), (len(tokens) - 2, 2))


@pytest.mark.parametrize("change", ["one fewer", "one more", "none", "apart"])
def test_tokens_that_are_not_those_of_the_images_are_refused(change):
    prompt = shown(3, 2)
    tokens, first = [*prompt.token_ids], prompt.token_ids.index(IMAGE)
    match change:
        case "one fewer":
            del tokens[first]
        case "one more":
            tokens.insert(first, IMAGE)
        case "none":
            tokens = [token for token in tokens if token != IMAGE]
        case "apart":
            tokens.insert(first + 1, 5)
    with pytest.raises(ValueError, match="image"):
        places(tokens, images_of(prompt))


def test_vllm_gets_pixels_and_tokens_as_the_trainer_has_them_and_nothing_of_older_weights(engine_inputs):
    prompt = shown(3, 2)
    parts = [*images_of(prompt), LATER]
    tokens = [*prompt.token_ids, IMAGE, IMAGE, 7]
    made, again = (engine_prompt(tokens, parts, f"weights {version}") for version in (1, 2))
    pixels, grids = (torch.cat([part.inputs[name] for part in parts]) for name in ("pixel_values", "image_grid_thw"))
    assert made["prompt_token_ids"] == tokens
    assert torch.equal(made["mm_kwargs"]["pixel_values"][0], pixels)
    assert made["mm_kwargs"]["pixel_values"][1] == ("flat", "image", grids.prod(-1).tolist())
    assert torch.equal(made["mm_kwargs"]["image_grid_thw"][0], grids)
    assert made["mm_placeholders"] == {"image": places(tokens, parts)}
    assert made["cache_salt"] == "weights 1"
    hashes = [*made["mm_hashes"]["image"], *again["mm_hashes"]["image"]]
    assert len({*hashes}) == len(hashes) == 6


def test_images_of_another_family_are_refused(engine_inputs):
    ids, made = VISION_FAMILIES["Idefics3"].prompt(1)
    with pytest.raises((ValueError, KeyError)):
        engine_prompt(ids, parts_of(made), "weights 1")


def test_images_survive_json_in_the_dtype_of_the_tower():
    (part,) = images_of(shown(3, 2))
    for dtype in (torch.float32, torch.bfloat16):
        back = Images.from_json(json.loads(json.dumps(part.to_json(dtype))))
        assert (back.digest, back.token_id) == (part.digest, part.token_id)
        assert torch.equal(back.inputs["pixel_values"], part.inputs["pixel_values"].to(dtype))
        assert torch.equal(back.inputs["image_grid_thw"], part.inputs["image_grid_thw"])


def server_request(prompt: Prompt) -> ServerRequest:
    (request,) = make_requests(PromptBatch((prompt,)), [SAMPLING])
    return ServerRequest("m", 4, request, (1,))


class FakeClient:
    """Answers every request alike, and keeps what was sent."""

    url = "http://here"

    def __init__(self, reply: Any) -> None:
        self.reply, self.sent = reply, []

    def request(self, method: str, path: str, body: Any = None, *, timeout: float) -> Any:
        self.sent.append((path, json.loads(json.dumps(body))))
        return self.reply, {VERSION_HEADER: "label"}


SERVER = VllmServer(ImageSettings([IMAGE, VIDEO], torch.float32))


def reply_to(asked: Prompt, **changed: Any) -> dict[str, Any]:
    sample = {"tokens": [5, 6], "logprobs": [-0.5, -1.0], "finish_reason": "length"}
    samples = [{"index": i, **sample} for i in (1, 0)]
    return {"prompt": len(asked.token_ids), "scores": [], "samples": samples, **changed}


def test_a_prompt_with_images_is_sent_with_them_and_no_response_may_have_their_tokens():
    prompt = shown(3, 2)
    client: Any = FakeClient(reply_to(prompt))
    samples, label = SERVER.sample(client, server_request(prompt), 1.0)
    ((path, body),) = client.sent
    assert (path, label, [each.tokens for each in samples]) == (IMAGES_ROUTE, "label", [[5, 6], [5, 6]])
    assert body["tokens"] == [*prompt.token_ids]
    assert body["salt"] == "weights 4"
    assert body["sampling"]["logit_bias"] == {str(IMAGE): -100.0, str(VIDEO): -100.0}
    assert (body["sampling"]["n"], body["sampling"]["stop"], body["sampling"]["detokenize"]) == (2, ["x"], True)
    (images,) = (Images.from_json(each) for each in body["images"])
    assert torch.equal(images.inputs["pixel_values"], images_of(prompt)[0].inputs["pixel_values"])


def test_a_prompt_of_text_of_such_a_model_goes_the_way_of_text_with_the_same_ban():
    client: Any = FakeClient({"choices": []})
    request = replace(server_request(shown(1)).request, images=None)
    SERVER.sample(client, ServerRequest("m", 4, request, (1,)), 1.0)
    ((path, body),) = client.sent
    assert (path, body["logit_bias"]) == ("/v1/completions", {str(IMAGE): -100.0, str(VIDEO): -100.0})
    VllmServer().sample(client, ServerRequest("m", 4, request, (1,)), 1.0)
    assert "logit_bias" not in client.sent[-1][1]


@pytest.mark.parametrize(
    "changed",
    [{"prompt": 3}, {"samples": None}, {"samples": [{"index": 1}]}, {"samples": [{"index": 0, "tokens": 3}]}],
)
def test_a_wrong_reply_is_no_sample(changed):
    prompt = shown(1)
    with pytest.raises(InvalidResponse):
        SERVER.sample(FakeClient(reply_to(prompt, **changed)), server_request(prompt), 1.0)  # pyright: ignore[reportArgumentType]


def test_a_sequence_with_images_is_scored_with_them():
    prompt = shown(1)
    scores = [-0.25] * (len(prompt.token_ids) - 1)
    client: Any = FakeClient(reply_to(prompt, scores=scores))
    request = ScoreRequest(prompt.token_ids, prompt.images)
    assert SERVER.score(client, "m", 4, request, 1.0) == (scores, "label")
    assert client.sent[0][1]["sampling"]["prompt_logprobs"] == 0
    for wrong in (scores[1:], [], ["x"] * len(scores), None):
        with pytest.raises(InvalidResponse):
            SERVER.score(FakeClient(reply_to(prompt, scores=wrong)), "m", 4, request, 1.0)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "status, reason", [({}, "its plugin is older"), ({"without_images": "it is old"}, "it is old")]
)
def test_a_server_that_takes_no_images_is_refused_with_what_it_says(status, reason):
    client: Any = FakeClient({"protocol": 2, **status})
    with pytest.raises(ConfigError, match=f"takes no prompts with images: {reason}"):
        SERVER.model_of(client, 1.0)
    with pytest.raises(InvalidResponse):  # its next reply lists no model: this one asks for no images
        VllmServer().model_of(client, 1.0)


class SamplingEngine(plugin_tests.Engine):
    """Returns a sample for each request; one that is left waits until it is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []
        self.waits = self.cancelled = False

    async def generate(self, prompt: Any, settings: Any, request_id: str, lora_request: Any) -> Any:
        self.given.append((prompt, settings, lora_request))
        try:
            if self.waits:
                await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        candidate = {5: SimpleNamespace(logprob=-0.5)}
        sample = SimpleNamespace(index=0, token_ids=[5], logprobs=[candidate], finish_reason="length")
        tokens = prompt["prompt_token_ids"]
        scores = [None, *({token: SimpleNamespace(logprob=-1.0)} for token in tokens[1:])]
        yield SimpleNamespace(outputs=[sample], prompt_token_ids=tokens, prompt_logprobs=scores)


@pytest.fixture
def served(guard, engine_inputs, monkeypatch):
    """Return the guarded application of a vLLM that samples, and what it is asked with."""
    made, app = guard
    app.state.engine_client = SamplingEngine()
    app.state.openai_serving_models = SimpleNamespace(lora_requests={"adapter": "the adapter"})
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **given: SimpleNamespace(**given)))
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    client: Any = FakeClient(reply_to(shown(3, 2)))
    SERVER.sample(client, server_request(shown(3, 2)), 1.0)
    return made, app, client.sent[0][1]


def test_the_server_samples_a_prompt_with_images_with_its_weights_in_the_header(served):
    made, app, body = served
    status, headers, reply = asyncio.run(plugin_tests.ask(made, app, IMAGES_ROUTE, body | {"model": "adapter"}))
    ((prompt, given, adapter),) = app.state.engine_client.given
    assert (status, headers[VERSION_HEADER]) == (200, "-1")
    assert reply["samples"] == [{"index": 0, "tokens": [5], "logprobs": [-0.5], "finish_reason": "length"}]
    assert (reply["prompt"], reply["scores"]) == (len(body["tokens"]), [-1.0] * (len(body["tokens"]) - 1))
    assert (given.logit_bias, given.output_kind, adapter) == ({IMAGE: -100.0, VIDEO: -100.0}, "final", "the adapter")
    assert torch.equal(prompt["mm_kwargs"]["pixel_values"][0], images_of(shown(3, 2))[0].inputs["pixel_values"])


@pytest.mark.parametrize("wrong", [{"images": []}, {"tokens": [1, 2]}, {"images": [{"tensors": "?"}]}, {"sampling": 3}])
def test_a_request_that_is_none_is_refused_by_the_server(served, wrong):
    made, app, body = served
    assert asyncio.run(plugin_tests.ask(made, app, IMAGES_ROUTE, body | wrong))[0] == 400
    assert app.state.engine_client.given == []


def test_what_vllm_raises_is_in_the_reply(served):
    made, app, body = served

    def fail(*given: Any, **more: Any) -> Any:
        raise RuntimeError("the engine died")

    app.state.engine_client.generate = fail
    status, _, reply = asyncio.run(plugin_tests.ask(made, app, IMAGES_ROUTE, body))
    assert (status, "the engine died" in reply["error"]) == (500, True)


def test_a_request_whose_client_is_gone_ends(served):
    _, app, body = served
    engine = app.state.engine_client
    engine.waits = True

    async def gone() -> Any:
        while not engine.given:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def left() -> Any:
        return await until_disconnect(gone, plugin_tests.guard_module.generate(app.state, body))

    assert asyncio.run(left()) is None
    assert engine.cancelled


def vision_parts(tmp_path, *overrides: str, url: str | None = None) -> EngineParts:
    model = model_of("Qwen2-VL")
    parts = parts_for(url, tmp_path, "model.path=folder", *overrides)
    return replace(parts, model=model, weights=ModuleWeights(model), image_sample=shown(1))


def test_weights_of_a_tower_are_sent_only_when_they_train(tmp_path):
    of_vision = {name for name, _ in ModuleWeights(model_of("Qwen2-VL")).full() if "visual" in name}
    assert len(of_vision) > 20
    for trained, sent in (("none", False), ("projector", True), ("all", True)):
        parts = vision_parts(tmp_path, f"model.train_vision={trained}")
        names = {name for name, _ in sent_weights(parts).full()}
        assert (of_vision <= names, of_vision & names == set()) == (sent, not sent)
        assert len(names) > 20
        assert engine_arguments(parts, None)["load_format"] == ("dummy" if sent else "auto")
        assert sent_weights(parts).adapter() is None


def test_a_server_that_runs_already_is_sent_all_weights(tmp_path):
    """Its tower may be another run's."""
    parts = vision_parts(tmp_path, url="http://127.0.0.1:1")
    assert sent_weights(parts) is parts.weights
    assert engine_arguments(parts, None)["load_format"] == "dummy"


def test_new_weights_drop_the_features_that_the_engine_remembers(guard, engine_inputs):
    """Else the features of another run's weights, or none at all, are found by the same version."""
    made, app = guard
    engine = app.state.engine_client

    async def reset_encoder_cache() -> None:
        engine.done.append("features")

    engine.reset_encoder_cache = reset_encoder_cache
    body = plugin_tests.weights_body(4)
    assert asyncio.run(plugin_tests.ask(made, app, WEIGHTS_ROUTE, body))[0] == 200
    assert engine.done[-1] == "reset"  # of a model of text
    engine.vllm_config.model_config.multimodal_config = SimpleNamespace(mm_device_do_normalize=False)
    assert asyncio.run(plugin_tests.ask(made, app, WEIGHTS_ROUTE, body))[0] == 200
    assert engine.done[-2:] == ["reset", "features"]


@pytest.mark.parametrize(
    ("key", "value"), [("mm_device_do_normalize", "true"), ("speculative_config", "{method: ngram}")]
)
def test_arguments_of_the_engine_that_do_not_go_with_images_are_refused(key, value):
    config = settings("rollout.engine=vllm", f"rollout.engine_kwargs={{{key}: {value}}}")
    reads, text = model_of("Qwen2-VL").config, tiny_qwen3().config
    with pytest.raises(ConfigError, match=rf"rollout\.engine_kwargs\.{key}: .* reads images: vLLM .*; leave it out"):
        check_images(config.rollout, "folder", reads, BACKEND)
    check_images(config.rollout, "folder", text, BACKEND)
    check_images(settings("rollout.engine=vllm").rollout, "folder", reads, BACKEND)


def test_a_vllm_for_images_leaves_them_as_they_are(tmp_path):
    parts = vision_parts(tmp_path, "data.images.max_per_prompt=3")
    arguments = engine_arguments(parts, None)
    assert (arguments["mm_device_do_normalize"], arguments["mm_processor_cache_gb"]) == (False, 0)
    assert arguments["limit_mm_per_prompt"] == {"image": 3, "video": 0}
    assert not any(name.startswith("mm_") for name in engine_arguments(replace(parts, image_sample=None), None))


def test_adapters_of_a_tower_are_not_served():
    with pytest.raises(ConfigError, match=r"model\.lora\.vision='all' with rollout\.engine='vllm'"):
        settings("rollout.engine=vllm", "model.lora.rank=4", "model.lora.vision=all")


@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
@pytest.mark.parametrize(
    "key", ["rollout.temperature", "rollout.final_temperature", "trainer.validation_sampling.temperature"]
)
def test_a_temperature_that_vllm_refuses_is_refused_before_the_run(engine, key):
    settings(f"rollout.engine={engine}", f"{key}=2")
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}=2\.1 with rollout\.engine='{engine}'"):
        settings(f"rollout.engine={engine}", f"{key}=2.1")


@pytest.mark.parametrize(
    ("engine", "kind", "able"), [("vllm", "gemma3", "local"), ("sglang_server", "qwen2_vl", "vllm")]
)
def test_an_engine_that_has_not_been_compared_with_a_model_takes_none_of_its_images(engine, kind, able):
    config = settings(f"rollout.engine={engine}")
    family = next(each for each in VISION_FAMILIES.values() if each.config().model_type == kind)
    with pytest.raises(ConfigError, match=rf"\({kind}\), which rollout\.engine='{engine}' does not take; .*{able}"):
        check_engine_reads_images(config, family.config())
    for fitting in ("local", able):
        check_engine_reads_images(settings(f"rollout.engine={fitting}"), family.config())


def test_requests_have_the_images_of_their_prompts():
    made = make_requests(PromptBatch((shown(1), replace(shown(2), images=None))), [SAMPLING] * 2)
    assert [isinstance(each, Request) and each.images is not None for each in made] == [True, False]
    assert placeholder_ids(model_of("Qwen2-VL").config) == [IMAGE, VIDEO]
