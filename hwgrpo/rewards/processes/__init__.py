"""Reward functions in separate processes, which can be killed.

reward_process.py   a reward function with a timeout, as the trainer calls it
limited_reward.py   a reward in one process, with a limit of its own on the time of a call
worker_pool.py      its processes: distribution of calls, timeouts, restarts
worker_handle.py    the trainer's handle of one process
worker_process.py   the main function of such a process, and its supervisor
reward_worker.py    what the process of a reward function does
messages.py         the messages between them
"""
