"""Agents: trajectories of several turns with tools and environments, through `rollout.workflow`.

action.py            the values between policy and environment: Action, ToolCall, ToolResult, Step
"""
