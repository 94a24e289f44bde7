"""How one policy is trained by one or many processes. The trainer speaks to `Strategy` alone."""
