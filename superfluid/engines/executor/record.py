"""The capability record of a runtime that the executor drives."""

import json
from collections.abc import Mapping
from typing import Any

from superfluid.engines.engine import MAX_ALTERNATIVES
from superfluid.engines.primitives import Description, Vocabulary

LOSSLESS = 0
STRATEGY = "prompt-lookup"
MEDIA = ("image_encode", "gemma_audio_encode", "whisper_transcribe", "whisper_translate")
NOT_CUT = "the state of this model cannot be cut back"


def static_record(of: Description) -> dict[str, Any]:
    """What every model on the runtime has, whatever is loaded: the sections a `check` report shows."""
    lossy = any(encoding != LOSSLESS for encoding in of.export_encodings)
    return {
        "descriptor_version": 1,
        "runtime": {"id": of.id},
        "load": {"paged_kv": False, "prefix_cache": True, "kv_bits": f"{of.id} chooses its cache types itself"},
        "workload": {
            "causal_generation": True,
            "embedding": f"{of.id} serves no embeddings",
            "speech_to_text": f"{of.id} serves no speech",
        },
        "modalities": dict.fromkeys(MEDIA, f"{of.id} takes text only"),
        "serving": {
            "sequences": True,
            "host_logits": True,
            "multi_row_verification": of.verify_rows or f"{of.id} gives one row a step",
            "speculation_strategies": [STRATEGY] if of.verify_rows else [],
            "prefix_seed": True,
            "park_lossless": True,
            "park_lossy": lossy or f"{of.id} exports state losslessly only",
            "round_granular": True,
        },
        "adaptation": {
            "lora_load": f"{of.id} loads no adapters",
            "lora_active_on_inference": f"{of.id} loads no adapters",
        },
        "ops": {
            "snapshot_restore": True,
            "seq_fork": True,
            "space_promote": "state comes back by restore",
            "cache_evict_entries": True,
        },
        "sampling": {
            "logit_bias": True,
            "penalties": True,
            "top_logprobs_max": MAX_ALTERNATIVES,
            "grammar": True,
            "engine_argmax": of.engine_sampling or f"{of.id} samples on the host",
            "engine_draws": of.engine_draws or f"{of.id} draws on the host",
        },
        "determinism": {
            "seed_reproducible": True,
            "batch_invariant": "a batch's size may change the last bits of a row",
        },
    }


def capability_record(
    of: Description, max_seq_len: int, max_batch: int, vocabulary: Vocabulary | None, overrides: Mapping[str, Any]
) -> str:
    """The record of a loaded model, as JSON text; `overrides` are laid over it, section by section."""
    record = static_record(of)
    cuts = of.truncate_partial
    record["runtime"]["version"] = of.version
    record["architecture"] = of.architecture
    record["backend"] = of.backend
    record["load"]["max_batch_size"] = max_batch
    record["serving"]["tick_yield"] = of.prefill_step_tokens > 0 or "a tick's prefill is one step"
    if of.verify_rows and not cuts:
        record["serving"] |= {"multi_row_verification": NOT_CUT, "speculation_strategies": []}
    if vocabulary is None or not vocabulary.eos:
        missing = "vocabulary" if vocabulary is None else "stop token"
        record["sampling"]["grammar"] = f"this model has no {missing} to constrain with"
    record["state"] = {
        "rollback": cuts or NOT_CUT,
        "shared_prefix_seed": True,
        "recurrent_snapshot": True if of.recurrent else "no recurrent state in this architecture",
        "legacy_save_load": "state moves by snapshot and restore",
    }
    record["limits"] = {
        "max_seq_len": max_seq_len,
        "max_seqs": of.max_seqs,
        "page_size_tokens": max(1, of.page_size_tokens),
        "cells_total": of.cells_total,
        "cache_resident_cells": of.cache_resident_cells,
        "cache_exported_cells": of.cache_exported_cells,
    }
    if of.sampling_defaults:
        record["sampling_defaults"] = dict(of.sampling_defaults)
    for section, leaves in overrides.items():
        held = record.get(section)
        record[section] = {**held, **leaves} if isinstance(held, dict) and isinstance(leaves, Mapping) else leaves
    return json.dumps(record)
