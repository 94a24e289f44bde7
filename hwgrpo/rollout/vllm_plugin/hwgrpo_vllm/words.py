"""The words that a trainer and its server have in common."""

TOKEN_VARIABLE = "HWGRPO_SERVER_TOKEN"
"""Environment variable of the server with the token that every request must bring."""
LIFELINE_VARIABLE = "HWGRPO_SERVER_LIFELINE"
"""Environment variable of a server that ends when its standard input is closed: when the run that started it is
gone."""
ADAPTER = "hwgrpo-adapter"
"""Name of the model that has the adapter."""
WEIGHTS_ROUTE = "/hwgrpo/weights"
GROUP_ROUTE = "/hwgrpo/group"
VERSION_HEADER = "x-hwgrpo-weight-version"
OWNER_HEADER = "x-hwgrpo-owner"
"""Header of requests with the session of the trainer whose weights the server has."""
NO_WEIGHTS = "-1"
"""Version of a server that has got no weights, or half of them."""
LEASE = 60.0
"""Seconds without a request from the trainer whose weights the server has, after which another run may take it."""
