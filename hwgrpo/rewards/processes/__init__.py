"""Reward functions in separate processes, which can be killed.

reward_process.py   a reward function with a timeout, as the trainer calls it
worker_pool.py      its processes: distribution of calls, timeouts, restarts
worker_handle.py    the trainer's handle of one process
reward_worker.py    the main function of the process
messages.py         the messages between them
"""
