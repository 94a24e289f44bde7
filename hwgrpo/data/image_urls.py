"""Images at http(s) URLs, fetched once, within limits on time, size and redirects."""

from __future__ import annotations

import hashlib
import http.client
import tempfile
import time
import urllib.error
import urllib.request
from http.client import HTTPMessage
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from hwgrpo.errors import DataError, error_text, quoted

SECONDS = 60.0
"""Most seconds for an image."""
SILENT_SECONDS = 15.0
"""Most seconds without a byte."""
CHUNK_BYTES = 1 << 16
REDIRECTS = 5


class Downloads:
    """Fetches files, each once, and keeps them in a temporary folder.

    Args:
        largest: most bytes of a file.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._folder = tempfile.TemporaryDirectory(prefix="hwgrpo-images-")

    def get(self, url: str, where: str) -> bytes:
        """Return the content at a URL.

        Args:
            url: http:// or https://.
            where: file, row and number, for messages.

        Raises:
            DataError: it cannot be fetched within the limits.
        """
        kept = Path(self._folder.name) / hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()
        if not kept.exists():
            kept.write_bytes(self._fetch(url, where))
        return kept.read_bytes()

    def _fetch(self, url: str, where: str) -> bytes:
        deadline, content = time.monotonic() + SECONDS, bytearray()
        try:
            with _opener().open(url, timeout=SILENT_SECONDS) as response:
                while chunk := response.read1(CHUNK_BYTES):
                    content += chunk
                    if len(content) > self._largest:
                        raise DataError(
                            f"{where}: {quoted(url)} is larger than data.images.max_mb={self._largest / 2**20:g}; "
                            "raise it, or leave out the row"
                        )
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"not complete after {SECONDS:g} s")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise DataError(
                f"{where}: {quoted(url)} cannot be fetched ({error_text(error, 200)}); download the images and name "
                "their files, or leave out the row"
            ) from error
        return bytes(content)


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = REDIRECTS

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        """Follow a redirect from http or https to the same, or to https."""
        if urlsplit(newurl).scheme not in {"https", urlsplit(req.full_url).scheme}:
            raise urllib.error.URLError(f"a redirect to {quoted(newurl)}, another scheme, is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener without the handlers of files, FTP and data."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener
