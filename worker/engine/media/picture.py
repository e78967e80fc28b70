"""Decodes pictures: sizes are read from the header, and refused, before a pixel is decoded.

Runs only in the decoder's process: decoders are native code, and the bytes are untrusted.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

from PIL import Image, ImageOps

from worker.engine.media.decoder import Picture
from worker.errors import InvalidRequest

FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP")
_NOT_READABLE = f"it is not a readable picture: {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
MAX_PIXELS = 1 << 25
"""Each takes three bytes, several times while the picture is prepared."""
MAX_SIDE = 1 << 15
MAX_RATIO = 200
"""The largest ratio of the longer side to the shorter: projectors scale a picture by either."""


def decode(encoded: bytes) -> Picture:
    """The pixels of a picture as it is meant to be seen: the first frame, turned as its EXIF says.

    Raises:
        InvalidRequest: it is not a readable picture, or too large.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damage that the decoder can live with
        try:
            image: Any = Image.open(io.BytesIO(encoded), formats=FORMATS)
        except Image.DecompressionBombError:
            raise InvalidRequest(f"the picture has more than {MAX_PIXELS:,} pixels") from None
        except Exception:  # a damaged header raises anything
            raise InvalidRequest(_NOT_READABLE) from None
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise InvalidRequest(
                f"the picture has {width} × {height} pixels; at most {MAX_PIXELS:,} are allowed"
            )
        if max(width, height) > min(MAX_SIDE, MAX_RATIO * min(width, height)):
            raise InvalidRequest(
                f"the picture has {width} × {height} pixels; a side may have at most {MAX_SIDE:,}, "
                f"and at most {MAX_RATIO} times as many as the other"
            )
        try:
            image.load()
            turned = _turned(image)
            rgb = _rgb(turned)
        except MemoryError:
            raise
        except Exception:
            raise InvalidRequest(f"the {image.format} picture is damaged or cut off") from None
    width, height = rgb.size
    return Picture(width, height, rgb.tobytes())


def _turned(image: Any) -> Any:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # the metadata may be damaged, too
        return image


def _rgb(image: Any) -> Any:
    """Three channels of eight bits; transparent pixels keep their colours."""
    if image.mode.startswith("I;16"):  # a conversion would clip values above 255
        image = image.point(lambda value: value / 256).convert("L")
    return image.convert("RGB")
