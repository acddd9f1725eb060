"""Loading and unloading adapters, by HTTP and by handle: vLLM's fields, OpenAI's answers."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from model.fields import Source, convert
from serve.adapter_loading import AdapterLoading
from serve.openai.answers import ModelCard, ModelDeleted
from serve.openai.body import parse
from serve.openai.endpoint import json_response, refusing, require_ready, small_body
from serve.openai.errors import ApiError
from serve.openai.generation import Serving
from serve.openai.schema import LoadAdapterRequest, UnloadAdapterRequest
from serve.served_models import ServedModel

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
S = TypeVar("S", bound=msgspec.Struct)


def model_card(serving: Serving, name: str, model: ServedModel) -> ModelCard:
    """Return what a model's list says of a name that means this model."""
    return ModelCard(
        id=name,
        created=model.created,
        max_model_len=serving.settings.max_model_len,
        parent=serving.models.base.name if model.adapter_id else None,
    )


async def answer_load(serving: Serving, request: Request) -> Response:
    require_loading(serving)
    asked = await _read(serving, request, LoadAdapterRequest)
    return json_response(await load(serving, asked))


async def answer_unload(serving: Serving, request: Request) -> Response:
    require_loading(serving)
    asked = await _read(serving, request, UnloadAdapterRequest)
    return json_response(await unload(serving, asked))


async def load(serving: Serving, asked: LoadAdapterRequest) -> ModelCard:
    """Return the card of an adapter that every engine has loaded; raises as `AdapterLoading`."""
    loading = require_loading(serving)
    require_ready(serving)
    return model_card(
        serving, asked.lora_name, await loading.load(asked.lora_name, asked.lora_path)
    )


async def unload(serving: Serving, asked: UnloadAdapterRequest) -> ModelDeleted:
    await require_loading(serving).unload(asked.lora_name)
    return ModelDeleted(id=asked.lora_name)


async def load_by_handle(serving: Serving, name: str, path: str) -> dict[str, Any]:
    """Return what HTTP would answer, to a call by handle; raises RequestRefused."""
    with refusing():
        given = {"lora_name": name, "lora_path": path}
        asked = convert(given, LoadAdapterRequest, Source.PYTHON)
        return dict(msgspec.to_builtins(await load(serving, asked)))


async def unload_by_handle(serving: Serving, name: str) -> dict[str, Any]:
    with refusing():
        asked = convert({"lora_name": name}, UnloadAdapterRequest, Source.PYTHON)
        return dict(msgspec.to_builtins(await unload(serving, asked)))


def require_loading(serving: Serving) -> AdapterLoading:
    """Return what loads adapters; ApiError where the deployment has no places for them."""
    if serving.loading is None:
        wanted = "places for adapters that are loaded while it serves"
        raise ApiError(404, f"max_loras: wanted {wanted}, found none in this deployment")
    return serving.loading


async def _read(serving: Serving, request: Request, kind: type[S]) -> S:
    return parse(await small_body(request), kind, serving.settings.max_model_len)
