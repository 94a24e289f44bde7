"""Rollout engines: what turns prompts into sampled responses, behind one protocol.

An engine is a callable that takes `parts.EngineParts` and returns an `engine.Engine`; a package adds one by
`ENGINES.register(name)`.
"""

from hwgrpo.registry import Registry

ENGINES = Registry(
    "rollout.engine",
    {
        "local": "hwgrpo.rollout.makers:local",
        "sglang_server": "hwgrpo.rollout.sglang_server:sglang_server",
        "vllm": "hwgrpo.rollout.vllm_engine:VllmEngine",
        "vllm_server": "hwgrpo.rollout.vllm_server:vllm_server",
    },
)
