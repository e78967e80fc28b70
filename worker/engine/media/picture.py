"""Decodes pictures: sizes are read from the header, and refused, before a pixel is decoded.

Only the decoder's process: decoders are native code, and the bytes are anybody's.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

from PIL import Image, ImageOps

from worker.engine.media.decoder import Picture
from worker.errors import InvalidRequest

FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP")
_NOT_READABLE = f"it is no picture that can be read: {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
MAX_PIXELS = 1 << 25
"""Three bytes each, several times while they are prepared."""
MAX_SIDE = 1 << 15
MAX_RATIO = 200
"""Of the longer side to the shorter: projectors scale a picture by either."""


def decode(encoded: bytes) -> Picture:
    """The pixels of a picture as it is meant to be seen: the first frame, turned as its EXIF says.

    Raises:
        InvalidRequest: it is no picture that can be read, or too large.
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
                f"the picture has {width} × {height} pixels; {MAX_PIXELS:,} are taken at most"
            )
        if max(width, height) > min(MAX_SIDE, MAX_RATIO * min(width, height)):
            raise InvalidRequest(
                f"the picture has {width} × {height} pixels; a side may have {MAX_SIDE:,} at most, "
                f"and {MAX_RATIO} times those of the other"
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
    except Exception:  # what is written beside the picture may be damaged, too
        return image


def _rgb(image: Any) -> Any:
    """Three channels of eight bits; what is transparent keeps its colour."""
    if image.mode.startswith("I;16"):  # a conversion would cut off what is above 255
        image = image.point(lambda value: value / 256).convert("L")
    return image.convert("RGB")
