"""Reward functions in processes of their own, which can be killed.

reward_process.py   a function with a timeout, as the trainer calls it
worker_pool.py      its processes: calls handed out, overrunning ones killed, dead ones replaced
worker_handle.py    one of them, seen from the trainer
reward_worker.py    one of them, seen from inside
messages.py         what the two say to each other
descendants.py      what a process started, in whatever session, found and ended
"""
