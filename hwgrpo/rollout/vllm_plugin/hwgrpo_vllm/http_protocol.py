"""Names and limits of the HTTP protocol between a trainer and its server."""

PROTOCOL = 2
"""Version of the protocol, which trainer and plugin must share. Since 2 weights carry checksums."""
TOKEN_VARIABLE = "HWGRPO_SERVER_TOKEN"
"""Environment variable of the server with the token that every request must carry."""
LIFELINE_VARIABLE = "HWGRPO_SERVER_LIFELINE"
"""Environment variable of a server that exits when its standard input closes, that is, when the run that started it has
ended."""
ADAPTER = "hwgrpo-adapter"
"""Name under which the adapter is served."""
WEIGHTS_ROUTE = "/hwgrpo/weights"
GROUP_ROUTE = "/hwgrpo/group"
IMAGES_ROUTE = "/hwgrpo/images"
VERSION_HEADER = "x-hwgrpo-weight-version"
OWNER_HEADER = "x-hwgrpo-owner"
"""Request header with the session of the trainer that sends it."""
NO_WEIGHTS = "-1"
"""Version of a server with no weights, or with a partial update."""
LEASE = 60.0
"""Seconds without a request from the owner after which another run may claim the server."""
