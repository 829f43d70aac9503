"""Models, health, metrics, the task dump and the tokenizer routes (spec: http, models; observability)."""

import time
from typing import Any

import trio
from quart import Response, request

from superfluid.api.http.app import json_response, read_body
from superfluid.api.http.context import Api
from superfluid.api.http.errors import ApiError, invalid, wrong_type
from superfluid.api.http.fields import Fields
from superfluid.daemon.model import Model
from superfluid.observe import tasks

METRICS_TYPE = "text/plain; version=0.0.4"


def model_object(model: Model) -> dict[str, Any]:
    """The entry of one loaded model."""
    record = model.record
    modalities = record.get("modalities", {})
    inputs = ["text"]
    inputs += ["image"] if modalities.get("image_encode") is True else []
    inputs += ["audio"] if modalities.get("gemma_audio_encode") is True else []
    return {
        "id": model.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "superfluid",
        "loaded": True,
        "meta": {"n_ctx": model.window},
        "architecture": {"input_modalities": inputs},
        "runtime": record.get("runtime", {"id": model.runtime_id}),
        "capabilities": {**record, "dialect": model.dialect_capabilities()},
    }


async def list_models(api: Api) -> Response:
    data = [model_object(model) for model in sorted(api.daemon.models, key=lambda model: model.name)]
    return json_response({"object": "list", "data": data})


async def get_model(api: Api, name: str) -> Response:
    return json_response(model_object(await api.model(name)))


async def health(api: Api) -> Response:
    models = api.daemon.models
    return json_response(
        {"status": "ok", "models_loaded": sum(model.loaded for model in models), "models_known": len(models)}
    )


async def metrics(api: Api) -> Response:
    return Response(api.daemon.metrics_page(), content_type=METRICS_TYPE)


async def task_dump(api: Api) -> Response:
    if "application/json" in request.headers.get("Accept", ""):
        return json_response(tasks.dump_json(trio.lowlevel.current_root_task()))
    return Response(tasks.dump_text(trio.lowlevel.current_root_task()), content_type="text/plain; charset=utf-8")


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
    if not isinstance(tokens, list) or not all(isinstance(token, int) and token >= 0 for token in tokens):
        raise wrong_type("tokens", "an array of token ids", tokens)
    model = await _addressed(api, fields)
    bad = next((token for token in tokens if token >= model.tokenizer.vocab_size), None)
    if bad is not None:
        raise ApiError(400, f"token id {bad} is not in the vocabulary of {model.tokenizer.vocab_size}", param="tokens")
    return json_response({"text": await model.in_thread(model.tokenizer.decode, tokens)})
