"""Opening a model: weights, the shape of its cell pool, and the primitives over it."""

import os
from pathlib import Path
from typing import Any

import attrs

from superfluid.engines.kit.runtime import ModelRefused
from superfluid.engines.llamacpp.identity import weights_identity
from superfluid.engines.llamacpp.options import Settings
from superfluid.engines.llamacpp.primitives import LlamaPrimitives
from superfluid.engines.llamacpp.sequences import PoolTable, SequenceTable, StreamTable
from superfluid.engines.llamacpp.sizing import (
    CELL_STEP,
    LEAST_CELLS,
    Memory,
    cell_bytes,
    memory_of,
    offload_device,
    round_cells,
)
from superfluid.engines.primitives import Description
from superfluid.llama.header import Header, HeaderError, read_header
from superfluid.llama.library import Library, LoadError

RUNTIME_ID = "llamacpp"
MOST_LANES = 255
SPARE_STREAMS = 2  # beside the lanes: an entry of the prefix cache, and the one that moves need
LEAST_STREAMS, MOST_STREAMS = 4, 256
LEAST_IDS, MOST_IDS = 32, 256
SEED_MIN_TOKENS = 16  # a copy moves a whole state here, which a shorter seed is not worth
SHRINK_ATTEMPTS = 3

SAMPLING_DEFAULTS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


@attrs.frozen
class PoolShape:
    """`streams`: a buffer for each of `n_seq_max` sequences, else one pool; `cells` in all."""

    streams: bool
    n_seq_max: int
    cells: int


def cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def sampling_defaults(header: Header) -> dict[str, float]:
    """What the file publishes, by the names of a capability record."""
    return {name: header.metadata[key] for key, name in SAMPLING_DEFAULTS.items() if key in header.metadata}


def choose_shape(lanes: int, window: int, memory: Memory, per_cell: int, *, streams: bool) -> PoolShape:
    """The pool for `lanes` sequences of `window` tokens; `streams`: the model can have a buffer per sequence."""
    each = round_cells(window)
    if streams:
        wanted = min(max(lanes + SPARE_STREAMS, LEAST_STREAMS), MOST_STREAMS)
        count = min(wanted, memory.affordable_cells(wanted * each, per_cell, 0) // each)
        if count > lanes:
            return PoolShape(True, count, count * each)
    ids = min(max(2 * lanes, LEAST_IDS), MOST_IDS)
    return PoolShape(False, ids, round_cells(memory.affordable_cells(lanes * window, per_cell, window)))


def open_model(
    library: Library,
    path: Path,
    settings: Settings,
    *,
    window: int,
    lanes: int,
    shared_pool: bool | None = None,
) -> LlamaPrimitives:
    """Load `path` for `lanes` sequences of up to `window` tokens. `shared_pool` fixes the pool's shape.

    Raises ModelRefused.
    """
    if not 1 <= lanes <= MOST_LANES:
        raise ModelRefused(f"{lanes} lanes asked for, llama.cpp has at most {MOST_LANES} lanes (--max-batch)")
    try:
        header = read_header(path)
    except (HeaderError, OSError) as error:
        raise ModelRefused(str(error)) from None
    params = settings.model_params(library)
    split = settings.split(library)
    if split is not None:
        params.tensor_split = split
    try:
        model = library.load_model(path, params)
    except LoadError as error:
        raise ModelRefused(str(error)) from None
    try:
        return _open_context(library, model, header, settings, window=window, lanes=lanes, shared_pool=shared_pool)
    except BaseException:
        library.api.llama_model_free(model)
        raise


def _open_context(
    library: Library,
    model: Any,
    header: Header,
    settings: Settings,
    *,
    window: int,
    lanes: int,
    shared_pool: bool | None,
) -> LlamaPrimitives:
    api = library.api
    recurrent = bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))
    cuts = not recurrent and header.number("attention.sliding_window") <= 0
    per_cell = cell_bytes(header, settings.type_k, settings.type_v)
    memory = memory_of(library, settings.kv_layers)
    streams = cuts and not shared_pool
    shape = choose_shape(lanes, window, memory, per_cell, streams=streams)
    device = offload_device(library.devices()) if settings.gpu_layers != 0 else None
    context, shape = _make_context(library, model, settings, shape, per_cell, on_cpu=device is None)
    try:
        table_type: type[SequenceTable] = StreamTable if shape.streams else PoolTable
        sequences = table_type(
            library,
            context,
            n_seq_max=shape.n_seq_max,
            cells_total=shape.cells,
            cuts=cuts,
            per_cell=per_cell,
        )
        window_cells = int(api.llama_n_ctx_seq(context))
        description = Description(
            id=RUNTIME_ID,
            version=library.version,
            max_batch=lanes,
            max_seqs=shape.n_seq_max - 1,
            max_seq_len=min(window, window_cells),
            vocab_size=int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))),
            page_size_tokens=1,
            kv_bytes_per_token=per_cell,
            cells_total=shape.cells,
            truncate_partial=cuts,
            copy_shares_cells=not shape.streams,
            takeover_preferred=shape.streams,
            seed_min_tokens=SEED_MIN_TOKENS if shape.streams else 0,
            cache_resident_cells=0 if shape.streams else window,
            cache_exported_cells=memory.export_cells(shape.cells, per_cell),
            recurrent=recurrent,
            engine_sampling=True,
            engine_draws=False,
            verify_rows=True,
            verify_batches=True,
            prefill_step_tokens=min(int(api.llama_n_ubatch(context)), int(api.llama_n_batch(context))),
            weights_identity=weights_identity(header.files, settings.identity_suffix()),
            architecture=header.architecture,
            backend=device.backend if device is not None else "CPU",
            sampling_defaults=sampling_defaults(header),
        )
        return LlamaPrimitives(library, model, context, sequences, description, window_cells=window_cells)
    except BaseException:
        api.llama_free(context)
        raise


def _make_context(
    library: Library, model: Any, settings: Settings, shape: PoolShape, per_cell: int, *, on_cpu: bool
) -> tuple[Any, PoolShape]:
    """The context, and its shape after cells were given back where memory turned out short."""
    api = library.api
    params = settings.context_params(library, on_cpu=on_cpu, cores=cores())
    params.n_seq_max = shape.n_seq_max
    params.kv_unified = not shape.streams
    for attempt in range(SHRINK_ATTEMPTS):
        params.n_ctx = shape.cells
        library.errors.take()
        context = api.llama_init_from_model(model, params)
        if not context:
            raise ModelRefused(str(library.errors.failure(f"no context of {shape.cells} cells could be made")))
        memory = memory_of(library, settings.kv_layers)
        short = memory.headroom - memory.free if memory.free else 0
        fewer = max((shape.cells - short // per_cell) // CELL_STEP * CELL_STEP, LEAST_CELLS)
        if short <= 0 or shape.streams or fewer >= shape.cells or attempt == SHRINK_ATTEMPTS - 1:
            break
        api.llama_free(context)
        shape = attrs.evolve(shape, cells=fewer)
    return context, shape
