"""Images -> small copies for logs and the report."""

from __future__ import annotations

import io
from typing import Any

from hwgrpo.values import Thumbnail

LONGEST_SIDE = 256
"""Pixels of a thumbnail's longer side, at most."""
FEW_COLORS = 64
FEW_PIXELS = 64 * 64
"""An image of at most so many colors, as a drawing, or so many pixels is stored as PNG; others as JPEG."""
JPEG_QUALITY = 85


def make_thumbnail(image: Any) -> Thumbnail:
    """Return a copy of an image whose sides are at most `LONGEST_SIDE`.

    Args:
        image: a PIL image in RGB, which stays as it is.
    """
    small = image.copy()
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    file = io.BytesIO()
    if small.width * small.height <= FEW_PIXELS or small.getcolors(FEW_COLORS) is not None:
        small.save(file, "PNG")
    else:
        small.save(file, "JPEG", quality=JPEG_QUALITY)
    return Thumbnail(file.getvalue(), *image.size)
