"""Engines behind HTTP: vLLM and SGLang as servers that all ranks share.

engine.py             requests and weights for all servers
server_session.py     requests in turns, sent as they come
engine_state.py       what the servers must have, shared with the threads that look after them
request_router.py     spreads requests over the servers, with retries
rollout_server.py     one server: whether it takes requests, and its repair
server_api.py         the protocol of a kind of server, and code that the kinds share
vllm.py, sglang.py    the kinds
server_connection.py  connect to the servers or start one
server_environment.py the environment of a server that the run starts
server_process.py     a server process that the run starts and ends
http_client.py        HTTP requests with a token and limits on time and size
server_owner.py       the run whose weights a server has
weight_transfer.py    weight transfer through a folder or a process group
weights_folder.py     safetensors files per version
weights_group.py      the trainer's side of the process group
"""

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.rollout.engine_kind import EngineKind
from hwgrpo.rollout.vllm import IMAGE_MODELS, refuse_unserved


def _refuse_sglang(config: Config) -> None:
    lora = config.model.lora
    if lora.rank or lora.adapter:
        raise ConfigError(
            f"rollout.engine='sglang_server' with model.lora.rank={lora.rank}, model.lora.adapter={lora.adapter!r}: "
            "this engine transfers full models only; use rollout.engine=vllm_server, vllm or local"
        )
    if config.rollout.server.transfer == "group":
        raise ConfigError(
            "rollout.server.transfer='group' with rollout.engine='sglang_server': this engine transfers "
            "weights through a folder; leave it out"
        )


VLLM_SERVER = EngineKind(
    maker="hwgrpo.rollout.server.vllm:vllm_server",
    refuse=refuse_unserved,
    check_host="hwgrpo.rollout.server.server_connection:check_vllm_server",
    ask_environment="hwgrpo.rollout.server.server_connection:ask_vllm_server",
    check_server="hwgrpo.rollout.server.vllm:check_running",
    runs_vllm=True,
    image_models=IMAGE_MODELS,
    receives_in_group=True,
    has_sessions=True,
    remark="part of hwgrpo; vLLM is in the server's environment",
)
SGLANG_SERVER = EngineKind(
    maker="hwgrpo.rollout.server.sglang:sglang_server",
    refuse=_refuse_sglang,
    check_host="hwgrpo.rollout.server.server_connection:check_sglang_server",
    check_server="hwgrpo.rollout.server.sglang:check_running",
    has_sessions=True,
    remark="part of hwgrpo; it has never run with a real SGLang server",
)
