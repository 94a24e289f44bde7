"""Images of data rows -> RGB: files, bytes, data URIs, URLs and PIL images, within limits."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwgrpo.data.image_urls import Downloads
from hwgrpo.errors import DataError, error_text, quoted

PAYLOADS = ("image", "bytes", "base64", "path", "url", "image_url")
"""Fields of a block or dict, of which one has the image."""
ACCEPTED = (
    "an image is a path, bytes, a PIL image, a data URI, or a dict with one of "
    f"{', '.join(PAYLOADS)} ({{bytes, path}} as datasets stores it)"
)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are read; PIL reads others by running programs (EPS)."""
BOMB_PIXELS = 89_478_485
"""Most pixels that are decoded, PIL's own limit: 256 MiB in RGB."""
LONGEST_RATIO = 200
"""Image processors refuse images with such a ratio of their sides."""
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
DATA_URI = re.compile(r"data:([\w.+/-]*)((?:;[\w.+-]+=[^;,]*)*)(;base64)?,", re.I)
ALPHA = frozenset({"RGBA", "LA", "PA", "RGBa", "La"})
SIXTEEN_BIT = frozenset({"I", "I;16", "I;16L", "I;16B", "I;16N"})
LARGEST_16_BIT = 65_535


@dataclass(frozen=True)
class ReadImage:
    """An image as the model's processor gets it."""

    image: Any
    """A PIL image in RGB, of at most `data.images.max_pixels`."""
    digest: str
    """SHA-256 of its file, or of the pixels of a PIL image."""
    size: tuple[int, int]
    """Width and height before it was scaled down, in pixels."""


def digest_of(images: Sequence[ReadImage]) -> str:
    """Return a hash of the images of a row."""
    return hashlib.sha256("".join(each.digest for each in images).encode()).hexdigest()


def images_in(value: Any) -> list[Any]:
    """Return the images in a column: a list, or one image; none where nothing in it is filled."""
    if hasattr(value, "tolist") and not isinstance(value, memoryview):  # an array of objects
        value = value.tolist()
    listed = list(value) if isinstance(value, list | tuple) else [value]
    return [] if all(map(is_empty, listed)) else listed


def is_empty(value: Any) -> bool:
    """Return whether a value has no image: null, "", NaN, false, or a dict of those."""
    if isinstance(value, Mapping):
        return all(is_empty(each) for name, each in value.items() if name != "type")
    if is_picture(value):  # which PIL compares pixel by pixel
        return False
    if isinstance(value, float):  # tensors and arrays compare by element
        return math.isnan(value)
    return value is None or value is False or (isinstance(value, str | bytes) and not value.strip())


def payload_of(block: Mapping[str, Any], where: str) -> tuple[str, Any] | None:
    """Return the field of a dict that has its image, and the value; None where no field is filled.

    Raises:
        DataError: another field is filled, which would be ignored, or several have an image.
    """
    filled = [name for name, value in block.items() if name != "type" and not is_empty(value)]
    unknown = [name for name in filled if name not in PAYLOADS]
    if unknown:
        raise DataError(f"{where} has a field {quoted(unknown[0])}, which is not read; {ACCEPTED}")
    if "bytes" in filled:
        filled = [name for name in filled if name != "path"]  # there the name of the file
    if len(filled) > 1:
        raise DataError(f"{where} has an image in {' and in '.join(filled)}; leave one of them")
    return (filled[0], block[filled[0]]) if filled else None


def is_picture(value: Any) -> bool:
    """Return whether a value is a PIL image, without importing PIL."""
    return any(kind.__module__.partition(".")[0] == "PIL" for kind in type(value).__mro__)


class ImageReader:
    """Reads the images of rows.

    Args:
        config: the `data.images` settings.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._largest = int(config.max_mb * 2**20)
        self._downloads = Downloads(self._largest) if config.allow_urls else None

    def read_all(self, sources: Sequence[Any], folder: Path, place: str) -> list[ReadImage]:
        """Return the images of a row.

        Args:
            sources: what the row has for each.
            folder: relative paths begin here, unless `data.images.folder` is set.
            place: file and row, for messages.

        Raises:
            DataError: an image is missing, broken, too large or not allowed; the message names it.
        """
        return [self._read(each, folder, f"{place}: image {number}") for number, each in enumerate(sources, 1)]

    def _read(self, source: Any, folder: Path, where: str) -> ReadImage:
        content = self._content(source, folder, where)
        with _pil_errors(where):
            image, digest = decode(content, where) if isinstance(content, bytes) else own_image(content, where)
        return ReadImage(scaled_down(image, self._config.max_pixels), digest, image.size)

    def _content(self, source: Any, folder: Path, where: str) -> Any:
        """Return the bytes of an image's file, or a PIL image."""
        if isinstance(source, Mapping):
            payload = payload_of(source, where)
            if payload is None:
                raise DataError(f"{where} is empty; {ACCEPTED}")
            name, value = payload
            if name == "base64":
                return self._checked(_from_base64(value, where), where)
            if name == "image_url" and isinstance(value, Mapping):
                value = value.get("url")
            wanted = {"bytes": bytes | bytearray | memoryview, "path": str | os.PathLike}.get(name, object)
            if not isinstance(value, wanted):
                raise DataError(f"{where}: {name!r} is of type {type(value).__name__}; {ACCEPTED}")
            return self._content(value, folder, where)
        if isinstance(source, bytes | bytearray | memoryview):
            return self._checked(bytes(source), where)
        if isinstance(source, str):
            return self._named(source, folder, where)
        if isinstance(source, os.PathLike):
            return self._from_file(Path(source), folder, where)
        if is_picture(source):
            return source
        raise DataError(f"{where} is of type {type(source).__name__}; {ACCEPTED}")

    def _named(self, text: str, folder: Path, where: str) -> bytes:
        if text[:5].lower() == "data:":
            uri = DATA_URI.match(text[:1000])
            if uri is None or uri[3] is None:
                raise DataError(
                    f"{where}: the data URI {quoted(text[:40])} is not base64; write data:image/png;base64,..."
                )
            return self._checked(_from_base64(text[uri.end() :], where), where)
        scheme = SCHEME.match(text)
        if scheme is None:
            return self._from_file(Path(text), folder, where)
        name = scheme[1].lower()
        if name not in ("http", "https"):
            remedy = "write the path alone" if name == "file" else "copy the file here, and write its path"
            raise DataError(f"{where}: {quoted(text)} has the scheme {name}://, which is not read; {remedy}")
        if self._downloads is None:
            raise DataError(
                f"{where} is a URL ({quoted(text)}), and none is fetched; download the images and name their files, or "
                "set data.images.allow_urls=true"
            )
        return self._checked(self._downloads.get(text, where), where)

    def _from_file(self, path: Path, folder: Path, where: str) -> bytes:
        root = Path(self._config.folder).expanduser() if self._config.folder else folder
        full = root / path.expanduser()
        try:
            if not full.is_file():
                kind = "is no regular file" if full.exists() else "does not exist"
                raise DataError(
                    f"{where}: the file {quoted(str(full), 300)} {kind}; relative paths begin at "
                    "data.images.folder, or where it is null at the folder of the data file (those of observations: at "
                    "the working folder)"
                )
            self._check_size(full.stat().st_size, where)
            return self._checked(full.read_bytes(), where)
        except DataError:
            raise
        except (OSError, ValueError) as error:
            raise DataError(
                f"{where}: the file {quoted(str(full), 300)} cannot be read ({error_text(error, 200)}); check its name "
                "and permissions"
            ) from error

    def _checked(self, content: bytes, where: str) -> bytes:
        if not content:
            raise DataError(f"{where} is empty (0 bytes); write the file again, or leave out the row")
        self._check_size(len(content), where)
        return content

    def _check_size(self, size: int, where: str) -> None:
        if size > self._largest:
            raise DataError(
                f"{where} has {size / 2**20:.1f} MiB, more than data.images.max_mb={self._config.max_mb:g}; raise it, "
                "or store the image smaller"
            )


def _from_base64(text: Any, where: str) -> bytes:
    if isinstance(text, bytes):
        text = text.decode("ascii", "replace")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError, AttributeError) as error:
        raise DataError(
            f"{where} is not valid base64 ({error_text(error, 100)}); encode the bytes of its file"
        ) from error


@contextmanager
def _pil_errors(where: str) -> Iterator[None]:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below, by name
            yield
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise _too_many_pixels(where, "more than twice that") from error
    except Exception as error:  # PIL raises many types, whatever the content leads to
        raise DataError(
            f"{where} is broken or truncated ({error_text(error, 150)}); write the file again, or leave out the row"
        ) from error


def decode(content: bytes, where: str) -> tuple[Any, str]:
    """Return the content of a file as an RGB image, and the SHA-256 of the content.

    Raises:
        DataError: as `ImageReader.read_all`; PIL's own errors pass.
    """
    import io

    from PIL import Image, UnidentifiedImageError

    try:
        opened = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise DataError(
            f"{where} is of no known format (its file begins with {content[:8]!r}); store it as {', '.join(FORMATS)}"
        ) from error
    with opened:
        return as_rgb(opened, where), hashlib.sha256(content).hexdigest()


def own_image(image: Any, where: str) -> tuple[Any, str]:
    """Return a PIL image in RGB, and the SHA-256 of its pixels."""
    rgb = as_rgb(image, where)
    return rgb, hashlib.sha256(f"{rgb.size}".encode() + rgb.tobytes()).hexdigest()


def png_of(image: Any, where: str) -> bytes:
    """Return a PIL image as a PNG file, whose pixels are those of `own_image`.

    Raises:
        DataError: its size, frames or pixels cannot be used.
    """
    import io

    file = io.BytesIO()
    with _pil_errors(where):
        as_rgb(image, where).save(file, format="PNG", compress_level=1)
    return file.getvalue()


def as_rgb(image: Any, where: str) -> Any:
    """Return a new image in RGB: turned as its EXIF data says, with white where it is transparent.

    Args:
        image: a PIL image, decoded or not.
        where: file, row and number, for messages.

    Raises:
        DataError: its size, frames or pixels cannot be used.
    """
    from PIL import Image, ImageOps

    width, height = image.size
    if width == 0 or height == 0:
        raise DataError(f"{where} has {width} x {height} pixels; leave out the row")
    if width * height > BOMB_PIXELS:
        raise _too_many_pixels(where, f"{width:,} x {height:,}")
    if max(width, height) >= LONGEST_RATIO * min(width, height):
        raise DataError(
            f"{where} has {width:,} x {height:,} pixels, a ratio of {LONGEST_RATIO} or more, which image processors "
            "refuse; cut or pad it, or leave out the row"
        )
    if getattr(image, "format", None) != "MPO" and getattr(image, "is_animated", False):
        raise DataError(f"{where} has several frames ({image.format}); store one of them, or leave out the row")
    image.load()  # of MPO, as phones write JPEG with a preview, the first
    image = ImageOps.exif_transpose(image)
    if image.mode in SIXTEEN_BIT:
        image = _eight_bit(image, where)
    if image.mode == "F":
        raise DataError(f"{where} has pixels in floating point, whose range is not known; store it with 8 bits")
    if image.mode in ALPHA or "transparency" in image.info:
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def _eight_bit(image: Any, where: str) -> Any:
    """Return an image of 16 bits with 8, scaled; PIL's own conversion clips some of them at 255."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > LARGEST_16_BIT:
        raise DataError(f"{where} has pixels of 32 bits, beyond 0 to {LARGEST_16_BIT:,}; store it with 8 bits")
    return Image.fromarray(((values * 255 + LARGEST_16_BIT // 2) // LARGEST_16_BIT).astype(np.uint8))


def scaled_down(image: Any, max_pixels: int) -> Any:
    """Return an image of at most `max_pixels`, scaled down with its ratio where it has more."""
    from PIL import Image

    width, height = image.size
    if width * height <= max_pixels:
        return image
    scale = math.sqrt(max_pixels / (width * height))
    short = max(1, int(min(width, height) * scale))
    long = max(1, min(int(max(width, height) * scale), max_pixels // short))
    return image.resize((long, short) if width >= height else (short, long), Image.Resampling.BICUBIC)


def _too_many_pixels(where: str, pixels: str) -> DataError:
    return DataError(
        f"{where} has {pixels} pixels, and more than {BOMB_PIXELS:,} are not decoded, as they may fill the memory; "
        "store it smaller"
    )
