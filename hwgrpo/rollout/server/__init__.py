"""Engines behind HTTP: vLLM and SGLang as servers that all ranks share.

engine.py            requests, retries, recovery
dialect.py           what the kinds of server have in common, and where they differ
vllm.py, sglang.py   the kinds
attachment.py        find a server or start one
server_process.py    a server that the run starts, watches and ends
http_client.py       requests with a token and limits on time and size
owner.py             whose weights a server has
weight_transfer.py   how weights get there: a folder or a process group
weights_folder.py    safetensors files per version
weights_group.py     the trainer's side of the process group
"""

from hwgrpo.config.schema import Config
from hwgrpo.errors import ConfigError
from hwgrpo.rollout.engine_kind import EngineKind


def _refuse_sglang(config: Config) -> None:
    lora = config.model.lora
    if lora.rank or lora.adapter:
        raise ConfigError(
            f"rollout.engine='sglang_server' with model.lora.rank={lora.rank}, model.lora.adapter={lora.adapter!r}: "
            "it gets full models only; use rollout.engine=vllm_server, vllm or local"
        )
    if config.rollout.server.transfer == "group":
        raise ConfigError(
            "rollout.server.transfer='group' with rollout.engine='sglang_server': its weights go through a folder; "
            "leave it out"
        )


VLLM_SERVER = EngineKind(
    maker="hwgrpo.rollout.server.vllm:vllm_server",
    check_host="hwgrpo.rollout.server.attachment:check_vllm_server",
    check_server="hwgrpo.rollout.server.vllm:check_running",
    runs_vllm=True,
    receives_in_group=True,
    remark="part of hwgrpo; vLLM is in the server's environment",
)
SGLANG_SERVER = EngineKind(
    maker="hwgrpo.rollout.server.sglang:sglang_server",
    refuse=_refuse_sglang,
    check_host="hwgrpo.rollout.server.attachment:check_sglang_server",
    check_server="hwgrpo.rollout.server.sglang:check_running",
    remark="part of hwgrpo; it has never run with a real SGLang server",
)
