"""Rollout engines: what turns prompts into sampled responses, behind one protocol.

An engine is one file with an `EngineKind`, and one line of `hwgrpo.catalog.ENGINES`.

engine.py         the protocol
engine_kind.py    what is known of an engine before it is made
engine_parts.py   what an engine is made from
local/            the training model samples
vllm/             vLLM in the training process
server/           vLLM and SGLang as servers
vllm_plugin/, sglang_plugin/   what runs inside those servers
requests.py       what engines outside this project's own code are asked for
stopping.py       when a response ends
counter_rng.py    random numbers by seed, prompt, sample and position
weights.py        how an engine gets the policy's weights, whatever shards them
pause_gate.py     a thread that generates and one that exchanges weights, one at a time
"""
