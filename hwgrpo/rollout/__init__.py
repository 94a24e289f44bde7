"""Rollout engines, which turn prompts into sampled responses behind one protocol.

An engine is one file with an `EngineKind`, and one line of `hwgrpo.catalog.ENGINES`.

engine.py         the protocol, and that of sessions
workflow.py       responses in turns, sampled and observed: what authors of workflows use
workflow_engine.py   how the workflows of a batch get their tokens, from any engine
turn_template.py  the tokens between turns, by the chat template
engine_kind.py    capabilities and checks of an engine, known before it is made
shared_devices.py an engine's memory on the training devices
engine_parts.py   what an engine is built from
local/            sampling with the training model
vllm/             vLLM in the training process
server/           vLLM and SGLang as servers
vllm_plugin/, sglang_plugin/   code that runs inside those servers
requests.py       requests to vLLM and SGLang, and their responses -> completions
stopping.py       stop tokens and stop strings
counter_rng.py    random numbers by seed, prompt, sample and position
policy_weights.py the policy's full weights for an engine, whatever shards them
deadlines.py      deadlines of groups of responses
pause_gate.py     mutual exclusion of generation and weight exchange
"""
