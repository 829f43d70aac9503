"""Requests that one reply answers: each kind of `StateSyncReq` and what it asks of the engine."""

from collections.abc import Callable
from typing import Any

import numpy as np

from superfluid.engines.engine import Engine, EngineError, OnSegment, TokenArray
from superfluid.link import linkw
from superfluid.link.codes import Status

ReadSpan = Callable[[linkw.TokenRef], TokenArray]
"""Reads a span of the inbound ring. Raises EngineError -103 when it cannot be read."""

_HANDLERS: dict[type[Any], Callable[["Desk", Any], linkw.StateSyncOk]] = {}


def _answers(request: type[Any]) -> Callable[[Any], Any]:
    def register(handler: Any) -> Any:
        _HANDLERS[request] = handler
        return handler

    return register


class Desk:
    """Answers synchronous requests. `on_segment` takes the segments of a streaming transcription."""

    def __init__(self, engine: Engine, read_span: ReadSpan, on_segment: OnSegment) -> None:
        self.engine = engine
        self.read_span = read_span
        self.on_segment = on_segment

    def draft(self, request: linkw.StateSyncReq) -> Callable[[], None] | None:
        """Work for another thread behind which `answer` takes no time; None when there is none."""
        if isinstance(request, linkw.CreateGrammarReq):
            return self.engine.grammar_draft("schema", request.json_schema)
        if isinstance(request, linkw.CreateGrammarStructuralReq):
            return self.engine.grammar_draft("structural", request.tag_json)
        return None

    def answer(self, request: linkw.StateSyncReq) -> linkw.StateSyncRes:
        try:
            return linkw.StateSyncDone(_HANDLERS[type(request)](self, request))
        except EngineError as error:
            return linkw.StateSyncErr(error.status)


# ---- sequences and their state


@_answers(linkw.ForkReq)
def _fork(desk: Desk, request: linkw.ForkReq) -> linkw.StateSyncOk:
    return linkw.ForkOk(desk.engine.seq_fork(request.parent_sequence, request.flags))


@_answers(linkw.TrimReq)
def _trim(desk: Desk, request: linkw.TrimReq) -> linkw.StateSyncOk:
    desk.engine.space_trim(request.sequence, request.space_id, request.new_len)
    return linkw.TrimOk()


@_answers(linkw.ExportSizeReq)
def _export_size(desk: Desk, request: linkw.ExportSizeReq) -> linkw.StateSyncOk:
    span = request.range
    return linkw.ExportSizeOk(
        *desk.engine.space_export_size(request.sequence, request.space_id, span.start, span.end, request.encoding)
    )


@_answers(linkw.SnapshotBoundaryReq)
def _boundary(desk: Desk, request: linkw.SnapshotBoundaryReq) -> linkw.StateSyncOk:
    return linkw.SnapshotBoundaryOk(
        desk.engine.space_snapshot_boundary(request.sequence, request.space_id, request.cap)
    )


@_answers(linkw.LaneSequenceReq)
def _lane_sequence(desk: Desk, request: linkw.LaneSequenceReq) -> linkw.StateSyncOk:
    sequence = desk.engine.lane_sequence(request.lane_tag)
    if sequence is None:
        raise EngineError(Status.UnknownHandle, f"no lane {request.lane_tag}")
    return linkw.LaneSequenceOk(sequence)


@_answers(linkw.CreateSequenceReq)
def _create_sequence(desk: Desk, request: linkw.CreateSequenceReq) -> linkw.StateSyncOk:
    return linkw.CreateSequenceOk(desk.engine.create_sequence())


@_answers(linkw.FreeSequenceReq)
def _free_sequence(desk: Desk, request: linkw.FreeSequenceReq) -> linkw.StateSyncOk:
    desk.engine.free_sequence(request.sequence)
    return linkw.FreeSequenceOk()


# ---- the prefix cache


@_answers(linkw.CacheEvictReq)
def _evict(desk: Desk, request: linkw.CacheEvictReq) -> linkw.StateSyncOk:
    return linkw.CacheEvictOk(desk.engine.cache_evict(request.bytes_target, request.policy))


@_answers(linkw.CacheEvictEntriesReq)
def _evict_entries(desk: Desk, request: linkw.CacheEvictEntriesReq) -> linkw.StateSyncOk:
    desk.engine.cache_evict_entries(request.keys)
    return linkw.CacheEvictEntriesOk()


@_answers(linkw.PublishSequenceReq)
def _publish(desk: Desk, request: linkw.PublishSequenceReq) -> linkw.StateSyncOk:
    desk.engine.publish_sequence(request.sequence, desk.read_span(request.span))
    return linkw.PublishSequenceOk()


@_answers(linkw.AdoptSequenceReq)
def _adopt(desk: Desk, request: linkw.AdoptSequenceReq) -> linkw.StateSyncOk:
    return linkw.AdoptSequenceOk(desk.engine.seed_adopt(request.sequence, desk.read_span(request.span)))


@_answers(linkw.UnpublishReq)
def _unpublish(desk: Desk, request: linkw.UnpublishReq) -> linkw.StateSyncOk:
    desk.engine.unpublish(desk.read_span(request.span))
    return linkw.UnpublishOk()


# ---- constraints


@_answers(linkw.CreateGrammarReq)
def _grammar(desk: Desk, request: linkw.CreateGrammarReq) -> linkw.StateSyncOk:
    return linkw.CreateGrammarOk(desk.engine.grammar_create(request.json_schema))


@_answers(linkw.CreateGrammarStructuralReq)
def _structural(desk: Desk, request: linkw.CreateGrammarStructuralReq) -> linkw.StateSyncOk:
    return linkw.CreateGrammarOk(desk.engine.grammar_create_structural(request.tag_json))


@_answers(linkw.FreeGrammarReq)
def _free_grammar(desk: Desk, request: linkw.FreeGrammarReq) -> linkw.StateSyncOk:
    desk.engine.grammar_free(request.grammar_handle)
    return linkw.FreeGrammarOk()


@_answers(linkw.CreateLogitBiasReq)
def _bias(desk: Desk, request: linkw.CreateLogitBiasReq) -> linkw.StateSyncOk:
    if len(request.tokens) != len(request.values):
        raise EngineError(
            Status.RejectBadStruct, f"a bias of {len(request.tokens)} tokens and {len(request.values)} values"
        )
    values = np.asarray(request.values, np.uint32).view(np.float32)
    return linkw.CreateLogitBiasOk(desk.engine.logit_bias_create(request.tokens, values.tolist()))


@_answers(linkw.FreeLogitBiasReq)
def _free_bias(desk: Desk, request: linkw.FreeLogitBiasReq) -> linkw.StateSyncOk:
    desk.engine.logit_bias_free(request.handle)
    return linkw.FreeLogitBiasOk()


# ---- other workloads


@_answers(linkw.MediaProbeReq)
def _probe(desk: Desk, request: linkw.MediaProbeReq) -> linkw.StateSyncOk:
    return linkw.MediaProbeOk(desk.engine.media_probe(request.image_path))


@_answers(linkw.MediaEncodeReq)
def _encode(desk: Desk, request: linkw.MediaEncodeReq) -> linkw.StateSyncOk:
    return linkw.MediaEncodeOk(*desk.engine.media_encode(request.image_path))


@_answers(linkw.MediaReleaseReq)
def _release_media(desk: Desk, request: linkw.MediaReleaseReq) -> linkw.StateSyncOk:
    desk.engine.media_release(request.media_handle)
    return linkw.MediaReleaseOk()


@_answers(linkw.MediaBindReq)
def _bind(desk: Desk, request: linkw.MediaBindReq) -> linkw.StateSyncOk:
    desk.engine.media_bind(request.lane_tag, request.media_handle, request.token_offset)
    return linkw.MediaBindOk()


@_answers(linkw.ForwardStageReq)
def _forward(desk: Desk, request: linkw.ForwardStageReq) -> linkw.StateSyncOk:
    result = desk.engine.forward_stage(request.tokens, request.start_layer, request.end_layer, request.hidden_in)
    return linkw.ForwardStageOk(None, result) if isinstance(result, int) else linkw.ForwardStageOk(result, None)


@_answers(linkw.EmbedReq)
def _embed(desk: Desk, request: linkw.EmbedReq) -> linkw.StateSyncOk:
    vector = desk.engine.embed(np.asarray(request.tokens, np.uint32))
    return linkw.EmbedOk(np.ascontiguousarray(vector, "<f4").tobytes())


@_answers(linkw.TranscribeReq)
def _transcribe(desk: Desk, request: linkw.TranscribeReq) -> linkw.StateSyncOk:
    return desk.engine.transcribe(request, desk.on_segment if request.stream else None)


@_answers(linkw.LoraLoadReq)
def _lora_load(desk: Desk, request: linkw.LoraLoadReq) -> linkw.StateSyncOk:
    desk.engine.lora_load(request.adapter_path)
    return linkw.LoraIdOk(desk.engine.lora_id())


@_answers(linkw.LoraUnloadReq)
def _lora_unload(desk: Desk, request: linkw.LoraUnloadReq) -> linkw.StateSyncOk:
    desk.engine.lora_unload()
    return linkw.LoraIdOk(desk.engine.lora_id())


@_answers(linkw.LoraIdReq)
def _lora_id(desk: Desk, request: linkw.LoraIdReq) -> linkw.StateSyncOk:
    return linkw.LoraIdOk(desk.engine.lora_id())


@_answers(linkw.CapabilitiesReq)
def _capabilities(desk: Desk, request: linkw.CapabilitiesReq) -> linkw.StateSyncOk:
    return linkw.CapabilitiesOk(desk.engine.capability_descriptor() or "")
