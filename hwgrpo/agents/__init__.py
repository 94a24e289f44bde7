"""Agents: trajectories of several turns with tools and environments, through `rollout.workflow`.

action.py            the values between policy and environment: Action, ToolCall, ToolResult, Step
environments.py      environments of the user: the protocol, calls with time limits, choice by row, reuse
agent_rows.py        prompts that environments give, and the tools that the chat template shows
episode.py           the workflows `environment` and `tools`
tool_answers.py      the answers of tools to a turn that calls them
call_formats.py      how families of models write tool calls
tools.py             the tools of `rollout.agent.tools`
agent_metrics.py     metrics of turns and calls
"""
