"""Rewards by services over HTTP.

http_reward.py           `http`: batches of prompts and responses to a URL, rewards back
served_reward_model.py   `served_reward_model`: a reward model on vLLM or SGLang
judge.py                 `judge`: a chat model that grades responses
judge_replies.py         the prompt of a judge, and the score in its reply
reply_cache.py           replies on disk, shared by ranks and runs
connection.py            address, key, limits and retries of a service, with their checks
concurrent_requests.py   requests at the same time, retried, each with its reply or its error
pacing.py                waits between attempts, and requests per minute
"""
