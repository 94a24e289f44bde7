"""Address, key, limits and retries of a service, as the `kwargs` of a reward name them."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from hwgrpo.errors import ConfigError, choice_error
from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.support.text import has_credentials, remember_secrets

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_REPLY_BYTES = 64 << 20


@dataclass(frozen=True)
class Connection:
    """How a service is called."""

    url: tuple[str, ...]
    """Address, or several of equal servers, which requests use in turn."""
    api_key_variable: str | None = None
    """Environment variable with the key, sent as `Authorization: Bearer`; None: no key."""
    max_concurrency: int = 16
    """Requests in flight, per rank."""
    timeout: float = 60.0
    """Seconds for one attempt, from connecting to the last byte."""
    retries: int = 3
    """Further attempts after one without a valid reply."""
    backoff: float = 0.5
    """Seconds before the second attempt, doubled before each further one."""
    max_wait: float = 60.0
    """Most seconds between two attempts; a server that asks for more has failed."""
    batch_timeout: float | None = None
    """Seconds for all requests of a batch, after which those without a reply have failed; None: no limit but theirs."""

    @staticmethod
    def of(reward: type, key: str, kwargs: Mapping[str, Any]) -> Connection:
        """Return the checked connection of a reward.

        Args:
            reward: the reward's class, whose own arguments an error names, too.
            key: the reward's setting ("reward.functions[0]").
            kwargs: the arguments that are not the class's own.

        Raises:
            ConfigError: an argument is unknown, missing or wrong, or the variable of the key is not set.
        """
        checks = Kwargs(key)
        known = {field.name: field for field in fields(Connection)}
        for name in kwargs:
            if name not in known:
                own = [
                    name for name in inspect.signature(reward).parameters if name not in ("key", "name", "connection")
                ]
                raise choice_error(f"{key}.kwargs: argument", name, [*known, *own])
        values = {name: kwargs.get(name, field.default) for name, field in known.items()}
        if values["url"] is MISSING:
            raise ConfigError(f"{key}: the service's address is missing; set {key}.kwargs.url")
        values["url"] = _addresses(checks, values["url"])
        checks.number("max_concurrency", values["max_concurrency"], at_least=1, whole=True)
        checks.number("timeout", values["timeout"], above=0)
        checks.number("retries", values["retries"], at_least=0, whole=True)
        checks.number("backoff", values["backoff"], at_least=0)
        checks.number("max_wait", values["max_wait"], at_least=0)
        if values["batch_timeout"] is not None:
            checks.number("batch_timeout", values["batch_timeout"], above=0)
        connection = Connection(**values)
        connection.headers(key)
        return connection

    def headers(self, key: str) -> dict[str, str]:
        """Return the headers of requests; the key is read from its variable and appears in no message.

        Raises:
            ConfigError: the variable is not set, or is no name of one.
        """
        name = self.api_key_variable
        if name is None:
            return {}
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):  # it may be the key itself: it is not shown
            raise ConfigError(
                f"{key}.kwargs.api_key_variable must be the name of an environment variable that holds the key"
            )
        value = os.environ.get(name, "").strip()
        if not value:
            raise ConfigError(f"{key}.kwargs.api_key_variable={name}: the environment variable is not set; export it")
        remember_secrets([value])
        return {"Authorization": f"Bearer {value}"}


def _addresses(checks: Kwargs, value: Any) -> tuple[str, ...]:
    addresses = [value] if isinstance(value, str) else value
    if not isinstance(addresses, list | tuple) or not addresses:
        raise checks.error("url", value, "must be an address or a list of addresses")
    for address in addresses:
        try:
            parts = urlsplit(address) if isinstance(address, str) else None
            valid = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)
            valid = valid and (parts is None or parts.port is None or parts.port > 0)
        except ValueError:
            valid = False
        if isinstance(address, str) and has_credentials(address):
            raise ConfigError(
                "url has credentials in it, which would be stored with the settings: put the key into an environment "
                "variable and name that with api_key_variable"
            )
        if not valid:
            raise checks.error("url", address, "must begin with http:// or https:// and name a host")
    return tuple(addresses)
