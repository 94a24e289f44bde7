"""`served_reward_model` on vLLM's CPU build gives the values of `reward_model` on the same model."""

import shlex
import signal
import subprocess
import time
import urllib.request

import pytest
import torch

from hwgrpo.config.schema import RewardFunctionConfig
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.values import Completions, Prompt, PromptBatch
from tests.docs.pages import blocks, page
from tests.support.models.reward_models import character_tokenizer, save_reward_model
from tests.vllm import vllm_environment

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
"""fp32 in both; other orders of sums in two layers, on logits of about 1."""
PORT = "18731"
START_SECONDS = 600.0
ON_A_CPU = ("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--distributed-executor-backend", "uni")
TEXTS = ("4", "the answer is four", "no")
MESSAGES = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"})


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Serve a model with the command of the page; return its folder."""
    [line] = [line for block in blocks(page("reward-models.md"), "bash") for line in block.splitlines()]
    program, command, _, *options = shlex.split(line)
    assert (program, command) == ("vllm", "serve")
    folder = tmp_path_factory.mktemp("model")
    save_reward_model(folder, "decoder", chat=True, head=32)
    log = folder.parent / "server.log"
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", PORT, *options, *ON_A_CPU]
    environment = vllm_environment.environment(
        **vllm_environment.ONE_PROCESS,
        **vllm_environment.NOT_COMPILED,
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
    )
    with log.open("w") as output:
        process = subprocess.Popen(
            [vllm_environment.vllm_python(), *words], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.5)
        yield folder
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def rewards(name, messages, **kwargs):
    """Return the rewards of `TEXTS` by a registered reward."""
    prompt = Prompt("0:0", "prompt 0", (1, 2), None, {}, source="tests", messages=messages)
    lengths = torch.tensor([len(text) for text in TEXTS])
    completions = Completions(
        prompt_index=torch.zeros(len(TEXTS), dtype=torch.int64),
        tokens=torch.zeros(int(lengths.sum()), dtype=torch.int64),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        logprobs=torch.zeros(int(lengths.sum())),
        finished=torch.ones(len(TEXTS), dtype=torch.bool),
        texts=TEXTS,
    )

    class Config:
        functions = (RewardFunctionConfig(name=name, kwargs=kwargs),)

    with RewardPipeline(Config) as pipeline:
        return pipeline.score(PromptBatch((prompt,)), completions).total.tolist()


@pytest.mark.parametrize("tokenizer", [False, True], ids=["template there", "template here"])
@pytest.mark.parametrize("messages", [None, MESSAGES], ids=["plain", "chat"])
@pytest.mark.parametrize("api", ["vllm_classify", "vllm_pooling"])
def test_a_served_model_gives_the_values_of_the_model_in_the_trainer(served, api, messages, tokenizer):
    plain = messages is None and not tokenizer
    expected = rewards("reward_model", messages, path=str(served), chat_template=not plain)
    kwargs = {"tokenizer": str(served)} if tokenizer else {}
    found = rewards("served_reward_model", messages, url=f"http://127.0.0.1:{PORT}", api=api, timeout=120.0, **kwargs)
    assert len({round(value, 3) for value in expected}) == len(TEXTS)
    assert found == pytest.approx(expected, abs=TOLERANCE)


def test_a_pair_has_a_score(served):
    """A decoder is asked as vLLM joins the pair: by its tokenizer."""
    found = rewards("served_reward_model", None, url=f"http://127.0.0.1:{PORT}", api="vllm_score", timeout=120.0)
    with torch.no_grad():
        model = save_reward_model(served.parent / "again", "decoder", chat=True, head=32)
        rows = [character_tokenizer()("prompt 0", text)["input_ids"] for text in TEXTS]
        expected = [float(model(input_ids=torch.tensor([row])).logits[0, 0]) for row in rows]
    assert found == pytest.approx(expected, abs=TOLERANCE)
