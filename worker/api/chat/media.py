"""Pictures and sounds in a request: decodes their base64, and leaves http(s) URLs to `links`. Only
the engine decodes pictures and sounds themselves. Pure functions, any thread."""

from __future__ import annotations

import base64
import re
from typing import Literal

from worker.api.http.faults import refusal
from worker.wire.engine_info import ProjectorInfo
from worker.wire.work import Medium

MAX_MEDIA = 64
"""The most media in one prompt."""
_SOUND = re.compile(rb"RIFF....WAVE|ID3|fLaC|\xff[\xe0-\xff]", re.DOTALL)
"""How WAV, MP3 and FLAC files begin."""
_BLANKS = b" \t\r\n"
_A_MEDIUM = "must be a data: URL such as data:image/png;base64,…, an http(s): URL, or base64"
_FETCHED = re.compile("https?://", re.IGNORECASE)
_DATA_URL = re.compile(
    r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(;[\w.+-]+=[^;,]*)*;base64,", re.ASCII | re.IGNORECASE
)


class Link(Medium, frozen=True, kw_only=True):
    """A medium that is still to be fetched; its `data` is empty."""

    url: str


def named_medium(kind: Literal["image", "audio"], url: str, field: str) -> Medium:
    """The medium of a `data:` URL or of plain base64, or a link.

    Raises:
        InvalidRequest: it is another URL, or not base64.
    """
    if _FETCHED.match(url):
        return Link(kind, b"", field, url=url)
    match = _DATA_URL.match(url, 0, 512)
    if match is None and ":" in url:
        what = f"{_A_MEDIUM}; it has {url.partition(':')[0][:16]}"
        raise refusal(field, "unsupported", what)
    if match is None:
        return medium_of(kind, url, field, _A_MEDIUM)
    return medium_of(kind, url[match.end() :], field)


def medium_of(
    kind: Literal["image", "audio"] | None, encoded: str, field: str, what: str = "must be base64"
) -> Medium:
    """A picture or sound from its base64; `what` says what else is accepted. Without a `kind`, its
    first bytes decide.

    Raises:
        InvalidRequest: it is not base64, or empty.
    """
    try:
        data = base64.b64decode(encoded.encode("ascii").translate(None, _BLANKS), validate=True)
    except ValueError:
        raise refusal(field, "base64", what) from None
    if not data:
        raise refusal(field, "minLength", "must not be empty")
    if kind is None:
        kind = "audio" if _SOUND.match(data) else "image"
    return Medium(kind, data, field)


def check_media(media: tuple[Medium, ...], projector: ProjectorInfo | None) -> None:
    """
    Raises:
        InvalidRequest: there are too many media, or the model does not accept one of them.
    """
    if len(media) > MAX_MEDIA:
        what = f"is one too many: a prompt may have at most {MAX_MEDIA} pictures and sounds"
        raise refusal(media[MAX_MEDIA].field, "maxItems", what)
    for medium in media:
        what, verb = ("pictures", "see") if medium.kind == "image" else ("sounds", "hear")
        if projector is None:
            why = f"this model is served without a projector; --mmproj FILE gives it one for {what}"
        elif not (projector.sees if medium.kind == "image" else projector.hears):
            why = f"this model's projector does not {verb} {what}"
        else:
            continue
        raise refusal(medium.field, "unsupported", f"is not supported: {why}")
