"""Image and audio parts: inline data only, judged with the body, then refused where the model takes none."""

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from superfluid.api.http.errors import ApiError, invalid
from superfluid.codec.conversation import Part, Turn
from superfluid.daemon.model import Model

ACCEPTS = {"image": ("image_encode", "images"), "audio": ("gemma_audio_encode", "audio")}
NOT_BUILT = "media reach no model yet"


@attrs.frozen
class Medium:
    """A part that is not text: its kind, its bytes, and the field that brought it."""

    kind: str
    data: bytes
    field: str


def read_media(turns: Sequence[Turn]) -> list[Medium]:
    """The media of a conversation. Raises ApiError 400 for what is no inline base64."""
    return [
        Medium(part.kind, _bytes(part, field), field)
        for index, turn in enumerate(turns)
        for part, field in _media_parts(turn, f"messages[{index}].content")
    ]


def _media_parts(turn: Turn, field: str) -> Iterator[tuple[Part, str]]:
    return ((part, field) for part in turn.parts if part.kind != "text")


def _bytes(part: Part, field: str) -> bytes:
    payload = part.payload if isinstance(part.payload, dict) else {}
    if part.kind == "image":
        url = payload.get("url", part.payload)
        if not isinstance(url, str) or not url.startswith("data:"):
            raise _bad("an image must be a data: URL; other URLs are not fetched", field)
        head, comma, encoded = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise _bad("an image's data: URL must hold base64 (data:<type>;base64,<data>)", field)
        return _decoded(encoded, field)
    if payload.get("format", "wav") != "wav":
        raise _bad(f"input_audio.format must be wav, got {payload.get('format')!r}", field)
    return _decoded(payload.get("data"), field)


def _decoded(encoded: Any, field: str) -> bytes:
    if not isinstance(encoded, str):
        raise _bad("media must be base64 text", field)
    compact = "".join(encoded.split()).rstrip("=")
    try:
        return base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad(f"media must be base64: {error}", field) from None


def _bad(message: str, field: str) -> ApiError:
    return invalid(message, field, "invalid_value")


def refuse_media(model: Model, media: Sequence[Medium]) -> None:
    """Raise ApiError 400 unsupported_input, in the runtime's own words, for media that the model does not take."""
    for medium in media:
        leaf, what = ACCEPTS[medium.kind]
        said = model.record.get("modalities", {}).get(leaf)
        reason = said if isinstance(said, str) else NOT_BUILT
        raise invalid(
            f"model '{model.name}' on runtime {model.runtime_id} does not accept {what}: {reason}",
            medium.field,
            "unsupported_input",
        )
