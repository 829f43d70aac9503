"""Models, health, metrics, the task dump and the tokenizer routes (spec: http, models; observability)."""

import platform
import time
from typing import Any

import trio
from quart import Response, request

from superfluid import __version__
from superfluid.api.http.app import MAX_BODY, json_response, read_body
from superfluid.api.http.completions import check_tokens, is_token
from superfluid.api.http.context import Api
from superfluid.api.http.errors import SERVER, ApiError, invalid, wrong_type
from superfluid.api.http.fields import Fields
from superfluid.daemon.generation import GenerateOptions
from superfluid.daemon.model import Model
from superfluid.daemon.overview import task_page
from superfluid.observe import tasks
from superfluid.observe.metrics import CONTENT_TYPE


def model_object(api: Api, model: Model) -> dict[str, Any]:
    """The entry of one model; what only its worker can tell is there once it is loaded."""
    record = model.record
    modalities = record.get("modalities", {})
    inputs = ["text"]
    inputs += ["image"] if modalities.get("image_encode") is True else []
    inputs += ["audio"] if modalities.get("gemma_audio_encode") is True else []
    entry: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "superfluid",
        "loaded": model.loaded,
        "meta": {"n_ctx": model.window},
        "architecture": {"input_modalities": inputs},
    }
    if model.loaded:
        entry["runtime"] = record.get("runtime", {"id": model.runtime_id})
        entry["capabilities"] = {**record, "dialect": model.dialect_capabilities() | api.daemon.fim.capabilities(model)}
    return entry


async def list_models(api: Api) -> Response:
    data = [model_object(api, model) for model in sorted(api.daemon.models, key=lambda model: model.name)]
    return json_response({"object": "list", "data": data})


async def get_model(api: Api, name: str) -> Response:
    return json_response(model_object(api, api.known(name)))


async def health(api: Api) -> Response:
    models = api.daemon.models
    return json_response(
        {"status": "ok", "models_loaded": sum(model.loaded for model in models), "models_known": len(models)}
    )


async def props(api: Api) -> Response:
    name = request.args.get("model")
    model = api.known(name) if name else api.daemon.default
    if request.args.get("autoload") in ("1", "true"):
        model = await api.model(model.name)
    template = model.tokenizer.template()
    body: dict[str, Any] = {
        "model": model.name,
        "default_model": api.daemon.default.name,
        "models": sorted(one.name for one in api.daemon.models if one.loaded),
        "loaded": model.loaded,
        "max_context": model.window,
        "total_slots": model.config.max_batch,
        "default_generation_settings": default_settings(model),
        "build": {"version": __version__, "target": f"{platform.machine()}-{platform.system().lower()}"},
        "server": "superfluid",
        "max_request_bytes": MAX_BODY,
        "capabilities": model_object(api, model).get("capabilities"),
    }
    if template:
        body["chat_template"] = template
    if model.config.kv_bits:
        body["kv_cache"] = {"bits": model.config.kv_bits, "dtype": f"q{model.config.kv_bits}"}
    return json_response(body)


def default_settings(model: Model) -> dict[str, Any]:
    """What applies to a request that gives none of these; an unloaded model's own defaults are not known."""
    most = model.window if model.config.max_tokens is None else model.config.max_tokens
    settings: dict[str, Any] = {
        "max_context": model.window, "n_ctx": model.window, "n_predict": most, "max_tokens": most
    }  # fmt: skip
    if model.loaded:
        sampling = model.settle(GenerateOptions())
        for field in ("temperature", "top_p", "top_k", "min_p", "repeat_penalty"):
            settings[field] = getattr(sampling, field)
    return settings


async def retired(api: Api, slot: str) -> Response:
    raise ApiError(
        501,
        f"slots are not saved or restored ({slot!r}): what lasts is the session log (WAL), the prefix cache, and "
        "--park for sessions resumed by id",
        kind=SERVER,
        code="route_retired",
    )


async def metrics(api: Api) -> Response:
    return Response(api.daemon.metrics_page(), content_type=CONTENT_TYPE)


async def task_dump(api: Api) -> Response:
    if "application/json" in request.headers.get("Accept", ""):
        return json_response(tasks.dump_json(trio.lowlevel.current_root_task()))
    page = task_page(api.daemon, trio.lowlevel.current_root_task())
    return Response(page, content_type="text/plain; charset=utf-8")


async def _addressed(api: Api, fields: Fields) -> Model:
    name = fields.string("model")
    return await api.model(name) if name else api.daemon.default


async def tokenize(api: Api) -> Response:
    fields = Fields.parse(await read_body())
    text = fields.string("content") if "content" in fields else fields.string("text")
    if text is None:
        raise invalid("missing required field: text", "text")
    model = await _addressed(api, fields)
    tokens = await model.in_thread(model.tokenizer.encode, text)
    return json_response({"tokens": tokens, "count": len(tokens)})


async def detokenize(api: Api) -> Response:
    fields = Fields.parse(await read_body())
    tokens = fields.raw("tokens")
    if not isinstance(tokens, list) or not all(is_token(token) for token in tokens):
        raise wrong_type("tokens", "an array of token ids", tokens)
    model = await _addressed(api, fields)
    check_tokens(tokens, model.tokenizer, "tokens")
    return json_response({"text": await model.in_thread(model.tokenizer.decode, tokens)})
