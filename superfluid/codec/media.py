"""Images and audio in prompts: the placeholders that stand for them, and the blocks that name them.

What a medium expands to is the engine's to say (MediaProbe); the tokens themselves are made here.
"""

import json
from collections.abc import Iterable, Sequence

import attrs

from superfluid.codec.blocks import IMAGE, VISIBILITY_VERSION
from superfluid.codec.framing import Encoder
from superfluid.link.events import Block
from superfluid.link.linkw import MediaInfo

MOST_PLACEHOLDERS = 4096  # of one medium: they must lie in one prefill chunk
ENCODER = "bundle-weights-identity"  # what the media identity says of the encoder: it is the model's own


class MediaRefused(Exception):
    """A medium that cannot be placed in a prompt (400)."""


class MissingMarker(MediaRefused):
    def __init__(self) -> None:
        super().__init__(
            "protocol: this model's chat template did not emit an image marker for every image part; "
            "it cannot place media"
        )


class StrayMarker(MediaRefused):
    def __init__(self) -> None:
        super().__init__("protocol: rendered prompt contains a media marker with no matching pending part")


class TooManyPlaceholders(MediaRefused):
    def __init__(self, count: int) -> None:
        super().__init__(f"image expands to {count} placeholders, beyond one prefill chunk")


@attrs.frozen
class Medium:
    """A blob of the media pool, and what the engine makes of it. Raises TooManyPlaceholders."""

    blob: str
    info: MediaInfo

    def __attrs_post_init__(self) -> None:
        if not 0 < self.info.n_tokens <= MOST_PLACEHOLDERS:
            raise TooManyPlaceholders(self.info.n_tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids that frame it: the placeholder, and its begin and end where there are any."""
        info = self.info
        return tuple(token for token in (info.image_token_id, info.boi_token_id, info.eoi_token_id) if token)

    def run(self, before: int | None = None, after: int | None = None) -> list[int]:
        """Its placeholders between begin and end, each left out where the token beside the run is already that."""
        info = self.info
        begin = [info.boi_token_id] if info.boi_token_id and info.boi_token_id != before else []
        end = [info.eoi_token_id] if info.eoi_token_id and info.eoi_token_id != after else []
        return [*begin, *[info.image_token_id] * info.n_tokens, *end]

    def block(self, role: int, offset: int, pre_text: str = "", post_text: str = "", span: Sequence[int] = ()) -> Block:
        """The event that names it; `offset` is the index of its first placeholder in the session's stream."""
        payload = {
            "blob": self.blob,
            "n_tokens": self.info.n_tokens,
            "image_token_id": self.info.image_token_id,
            "offset": offset,
            "pre_text": pre_text,
            "post_text": post_text,
            "media_identity": {"preprocessing_fp": f"{self.info.preprocess_fp:016x}", "encoder": ENCODER},
        }
        text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
        return Block(role, IMAGE, text, list(span), VISIBILITY_VERSION)


def between(head: list[int], medium: Medium, tail: Sequence[int]) -> tuple[list[int], int]:
    """A turn of its own for a medium: its tokens, and the index of the first placeholder."""
    run = medium.run()
    return [*head, *run, *tail], len(head) + run.index(medium.info.image_token_id)


def place(ids: Sequence[int], media: Sequence[Medium]) -> tuple[list[int], list[int]]:
    """The prompt with every marker that a template wrote replaced, in order, by a medium's run, and the index of each
    first placeholder.

    A marker is a medium's placeholder token; where the template writes none, its begin token. Raises MediaRefused.
    """
    written = set(ids)
    markers = {
        info.image_token_id if info.image_token_id in written else info.boi_token_id or info.image_token_id
        for info in (medium.info for medium in media)
    }
    pending = list(reversed(media))
    out: list[int] = []
    offsets: list[int] = []
    for at, token in enumerate(ids):
        if token not in markers:
            out.append(token)
            continue
        if not pending:
            raise StrayMarker
        medium = pending.pop()
        if token not in medium.tokens:
            raise MissingMarker
        run = medium.run(out[-1] if out else None, ids[at + 1] if at + 1 < len(ids) else None)
        offsets.append(len(out) + run.index(medium.info.image_token_id))
        out += run
    if pending:
        raise MissingMarker
    return out, offsets


def guarded(encoder: Encoder, media: Iterable[Medium]) -> Encoder:
    """An encoder for which the media's tokens are markers: no text of a client becomes a placeholder."""
    literals = (encoder.literal(token) for token in sorted({token for medium in media for token in medium.tokens}))
    return encoder.with_markers(text for text in literals if text and len(encoder.encode_framing(text)) == 1)
