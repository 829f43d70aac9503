"""Reading harmony: headers name the channel, bodies are the text."""

from collections.abc import Mapping, Sequence

from superfluid.codec.channels import REASONING, TEXT, TOOL_CALL, Segment
from superfluid.codec.tokenizer import TokenBytes

START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN = (
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>",
)  # fmt: skip
NEEDED = (START, CHANNEL, MESSAGE, END, RETURN, CALL)
RECIPIENT = b"to="


class HarmonySplitter:
    """Starts in a header: the prompt ends with `<|start|>assistant`. Header tokens belong to the span of the body
    that follows; where a slice ends inside a header they are a segment without text."""

    __slots__ = (
        "_body",
        "_carried",
        "_constrained",
        "_header",
        "_ids",
        "_names",
        "_special",
        "ended",
        "table",
        "terminate",
    )

    def __init__(self, table: TokenBytes, ids: Mapping[str, int], *, terminate: bool = True) -> None:
        self.table = table
        self._ids = ids
        self._names = {ids[name]: name for name in (*NEEDED, CONSTRAIN) if name in ids}
        self._special = frozenset(self._names)
        self._body: int | None = None  # the channel of the open body; None: in a header
        self._header: list[bytes] = []
        self._carried = b""  # a recipient that stood before the channel
        self._constrained = False
        self.terminate = terminate
        self.ended = False

    @property
    def channel(self) -> int:
        return TEXT if self._body is None else self._body

    @property
    def closer(self) -> int | None:
        return None if self._body is None else self._ids[END]

    @property
    def special(self) -> frozenset[int] | None:
        return None if self._body is None or self.ended else self._special

    def open_channel(self, channel: int) -> None:
        """A forced call writes its own header."""

    def flush(self) -> bytes:
        return b""

    def feed(self, tokens: Sequence[int]) -> list[Segment]:
        segments: list[Segment] = []
        span: list[int] = []
        data: list[bytes] = []

        def cut(closes: bool) -> None:
            nonlocal span, data
            if span:
                segments.append(Segment(span, b"".join(data), self.channel, closes))
            span, data = [], []

        for token in tokens:
            if self.ended:
                span.append(token)
                continue
            name = self._names.get(token)
            if name in (START, CHANNEL):
                if self._body is not None:
                    cut(False)
                    self._body = None
                self._open_header(name == START)
                span.append(token)
            elif name == MESSAGE and self._body is None:
                span.append(token)
                data = [self._enter_body()]
            elif name in (END, RETURN, CALL):
                span.append(token)
                if self._body is not None:
                    cut(True)
                    self._body = None
                self._open_header(True)
                self.ended = self.terminate and name in (RETURN, CALL)
            elif name is not None:
                span.append(token)
                self._constrained |= self._body is None and name == CONSTRAIN
            else:
                span.append(token)
                if self._body is not None:
                    data.append(self.table.of(token))
                elif not self._constrained:
                    self._header.append(self.table.of(token))
        cut(False)
        return segments

    def _open_header(self, anew: bool) -> None:
        """`<|start|>` forgets everything; `<|channel|>` keeps a recipient."""
        written = b"".join(self._header)
        at = written.find(RECIPIENT)
        if anew:
            self._carried = b""
        elif at >= 0:
            start = 0
            for piece in self._header:  # from the token in which it starts
                if start + len(piece) > at:
                    break
                start += len(piece)
            self._carried = written[start:]
        self._header = []
        self._constrained = False

    def _enter_body(self) -> bytes:
        """Settle the channel by the header; the text that leads the body (a call's header and recipient)."""
        header = b"".join(self._header)
        lead = header + self._carried
        self._header, self._carried, self._constrained = [], b"", False
        if RECIPIENT in lead:
            self._body = TOOL_CALL
            return lead
        self._body = REASONING if header.lstrip().startswith(b"analysis") else TEXT
        return b""
