"""What the mock answers beside the tick: embeddings, pipeline stages, transcription, media."""

import struct
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from superfluid.engines.engine import EngineError, OnSegment, TokenArray
from superfluid.engines.mock.config import N_LAYERS
from superfluid.link import linkw
from superfluid.link.codes import Status

EMBEDDING_WIDTH = 8
DURATION_MS = 1000
WORD_PAUSE = 0.002  # seconds between two streamed words
MEDIA_TOKENS = 4
PREPROCESS_FINGERPRINT = 0x4D4F434B
_HIDDEN = struct.Struct("<Q")
_LAYER = struct.Struct("<QI")


def embed(tokens: TokenArray) -> npt.NDArray[np.float32]:
    """8 floats, normalized."""
    values = [0.0] * EMBEDDING_WIDTH
    for i, token in enumerate(tokens.tolist()):
        values[i % EMBEDDING_WIDTH] += (token % 97 + 1) / (i + 1)
    vector = np.array(values)
    norm = float(np.linalg.norm(vector))
    return (vector / norm if norm else vector).astype(np.float32)


def forward_stage(
    tokens: Sequence[int], start_layer: int, end_layer: int, hidden_in: bytes | None, vocab_size: int
) -> bytes | int:
    """The hidden state after layers [start, end), or the token after the last. Raises EngineError -102, -114."""
    if start_layer > end_layer or end_layer > N_LAYERS:
        raise EngineError(Status.RejectBounds, f"layers {start_layer} to {end_layer} of {N_LAYERS}")
    if hidden_in is None:
        hidden = xxh3_64_intdigest(np.asarray(tokens, "<u4").tobytes())
    elif len(hidden_in) != _HIDDEN.size:
        raise EngineError(Status.RejectBadStruct, f"{len(hidden_in)} hidden bytes; {_HIDDEN.size} expected")
    else:
        (hidden,) = _HIDDEN.unpack(hidden_in)
    for layer in range(start_layer, end_layer):
        hidden = xxh3_64_intdigest(_LAYER.pack(hidden, layer))
    return hidden % vocab_size if end_layer == N_LAYERS else _HIDDEN.pack(hidden)


def transcribe(request: linkw.TranscribeReq, on_segment: OnSegment | None) -> linkw.TranscribeOk:
    """One segment, or one per word when `on_segment` streams; stopped, the text is what was said."""
    text = "mock translation" if request.translate else "mock transcription"
    if request.prompt:
        text = f"{request.prompt} {text}"
    language = request.language if request.language not in (None, "", "auto") else "en"
    assert language is not None
    if on_segment is None:
        return linkw.TranscribeOk(text, language, DURATION_MS, [_segment(0, DURATION_MS, text)])
    words = text.split()
    said: list[linkw.Segment] = []
    for i, word in enumerate(words):
        if i:
            time.sleep(WORD_PAUSE)
        segment = _segment(DURATION_MS * i // len(words), DURATION_MS * (i + 1) // len(words), word)
        said.append(segment)
        if not on_segment(segment):
            break
    return linkw.TranscribeOk(" ".join(segment.text for segment in said), language, DURATION_MS, said)


def _segment(start_ms: int, end_ms: int, text: str) -> linkw.Segment:
    return linkw.Segment(start_ms, end_ms, text, f32_bits(-0.25), f32_bits(0.01), f32_bits(1.5), f32_bits(0.0))


def f32_bits(value: float) -> int:
    """The bit pattern of an f32."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


class Media:
    """Encoded images: each handle is bound to one lane and used up by its prefill."""

    def __init__(self, image_token: int | None) -> None:
        self._image_token = image_token
        self._encoded: dict[int, linkw.MediaInfo] = {}
        self._bound: dict[int, dict[int, int]] = {}  # lane tag: prompt offset to handle
        self._next = 1

    def probe(self) -> linkw.MediaInfo:
        """Raises EngineError -127 without an image token."""
        if self._image_token is None:
            raise EngineError(Status.Unsupported, "this mock has no image token")
        return linkw.MediaInfo(MEDIA_TOKENS, self._image_token, 0, 0, PREPROCESS_FINGERPRINT)

    def encode(self) -> tuple[int, linkw.MediaInfo]:
        info = self.probe()
        handle = self._next
        self._next += 1
        self._encoded[handle] = info
        return handle, info

    def release(self, handle: int) -> None:
        self._require(handle)
        del self._encoded[handle]
        for offsets in self._bound.values():
            for offset in [offset for offset, bound in offsets.items() if bound == handle]:
                del offsets[offset]

    def bind(self, lane_tag: int, handle: int, offset: int) -> None:
        self._require(handle)
        self._bound.setdefault(lane_tag, {})[offset] = handle

    def drop_lane(self, lane_tag: int) -> None:
        for handle in self._bound.pop(lane_tag, {}).values():
            self._encoded.pop(handle, None)

    def whole(self, lane_tag: int) -> bool:
        """Whether the lane's chunk must not be cut."""
        return bool(self._bound.get(lane_tag))

    def consume(self, lane_tag: int, prompt: TokenArray, start: int, end: int) -> bool:
        """Use up what is bound in prompt[start:end]; false when that and its placeholders differ."""
        if self._image_token is None:
            return True
        covered: set[int] = set()
        bound = self._bound.get(lane_tag, {})
        for offset, handle in sorted(bound.items()):
            run = range(offset, offset + self._encoded[handle].n_tokens)
            if run.stop <= start or run.start >= end:
                continue
            covered.update(run)
            del self._encoded[bound.pop(offset)]
        placeholders = {start + int(i) for i in np.flatnonzero(prompt[start:end] == self._image_token)}
        return covered == placeholders

    def _require(self, handle: int) -> None:
        if handle not in self._encoded:
            raise EngineError(Status.UnknownHandle, f"no media {handle}")
