"""Agents: trajectories of several turns with tools and environments, through `rollout.workflow`.

action.py            the values between policy and environment: Action, ToolCall, ToolResult, StepResult
environments.py      environments of the user: the protocol, calls with time limits, choice by row, reuse
agent_rows.py        prompts that environments give, and the tools that the chat template shows
episode.py           the workflows `environment` and `tools`
tool_answers.py      the answers of tools to a turn that calls them
call_formats.py      how families of models write tool calls
tools.py             the tools that settings name
tool_processes.py    tools in processes of their own: distribution of calls, timeouts, restarts
tool_worker.py       what such a process does
thread_tool.py       registered tools, which limit their time themselves
tool_schema.py       schemas of tools, and the check of a call's arguments
tool_results.py      what a tool returns, as text and images
result_blocks.py     blocks of text and images in it
given_tools.py       functions that a trainer was given as objects, in threads
background_loop.py   an event loop for coroutines of the user's
calculator_tool.py   the tool `calculator`
search_tool.py       the tool `search`
guessing_game.py     the environment `guessing_game`
looking.py           the environment `looking`
gymnasium_env.py     the environment `gymnasium`
second_try.py        the environment `second_try`
followed_episode.py  an episode that a person follows or plays, turn by turn
agent_metrics.py     metrics of turns and calls
"""
