"""`/openapi.json`: what is accepted and answered, from the structs.

A request's schema is its struct's, bounds included. Each field may also be null, which is the same
as leaving it out; inert fields are there with the values that they are accepted at, ignored ones
without a type; nothing else is accepted. An answer's schema is its struct's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import msgspec

from model.fields import hints_of
from serve.config import ApiSettings
from serve.observe import page
from serve.observe.metrics import OPEN_METRICS, PLAIN
from serve.openai import answers, schema
from serve.openai.body import ignored_fields, inert_fields, structs_within
from serve.openai.errors import STATUSES, ErrorBody
from serve.openai.responses import ResponsesRequest
from serve.openai.tokenizing import DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{name}"
_REQUESTS = (
    schema.ChatRequest,
    schema.CompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    schema.LoadAdapterRequest,
    schema.UnloadAdapterRequest,
)
_ANSWERS = (
    answers.ChatCompletion,
    answers.ChatChunk,
    answers.Completion,
    answers.ModelList,
    answers.ModelCard,
    answers.ModelDeleted,
    answers.Tokenized,
    answers.Detokenized,
)

_GET_ERRORS = (400, 401, 403)
_POST_ERRORS = tuple(status for status in STATUSES if status not in (405, 501))


def document(settings: ApiSettings, model_names: Sequence[str]) -> bytes:
    """Return the document for a model that requests may call by these names."""
    structs = (*_REQUESTS, *_ANSWERS, ErrorBody)
    _, components = msgspec.json.schema_components(structs, ref_template=_REF)
    for struct in dict.fromkeys(each for request in _REQUESTS for each in _with_parts(request)):
        _describe_fields(components[struct.__name__], struct)
    _describe_what_is_checked_later(components, settings, model_names)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Lockstep", "version": metadata.version("lockstep-serve")},
            "paths": _paths(settings),
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )


def _with_parts(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    yield struct
    for kind in hints_of(struct).values():
        for part in structs_within(kind):
            yield from _with_parts(part)


def _describe_fields(component: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    properties = component["properties"]
    for name, found in properties.items():
        is_required = name in component.get("required", ())
        properties[name] = found if is_required else _or_null(found)
    for name, accepted in inert_fields(struct).items():
        properties[name] = {"enum": [*accepted, None]}
    properties.update({name: {} for name in sorted(ignored_fields(struct))})
    component["additionalProperties"] = False


def _describe_what_is_checked_later(
    components: dict[str, Any], settings: ApiSettings, model_names: Sequence[str]
) -> None:
    """Add what depends on the model."""
    length = {"type": "integer", "minimum": 1, "maximum": settings.max_model_len}
    of = {name: found["properties"] for name, found in components.items() if "properties" in found}
    for properties in (of[request.__name__] for request in _REQUESTS):
        if "model" in properties:
            properties["model"] = {"enum": [*model_names, None]}
    of["CompletionRequest"]["max_tokens"] = _or_null(dict(length))
    of["ChatRequest"]["max_completion_tokens"] = _or_null(dict(length))
    if settings.vocab_size is not None:
        token = {"type": "integer", "minimum": 0, "maximum": settings.vocab_size - 1}
        of["DetokenizeRequest"]["tokens"] = {"type": "array", "items": token}


def _or_null(found: dict[str, Any]) -> dict[str, Any]:
    if {"type": "null"} in found.get("anyOf", ()):
        return found
    default = {"default": found.pop("default")} if "default" in found else {}
    return {"anyOf": [found, {"type": "null"}], **default}


def _paths(settings: ApiSettings) -> dict[str, Any]:
    model = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ready = _get(_json())
    ready["get"]["responses"]["503"] = _with_content("Not ready, and how far it is.", _json())
    debugging = ("/debug/ranks", "/debug/ingress") if settings.args.debug else ()
    return {
        **{path: _get(_text(kind)) for path, (_, kind) in page.FILES.items()},
        "/status": _get(_json()),
        "/v1/chat/completions": _post("ChatRequest", "ChatCompletion", _events("ChatChunk")),
        "/v1/completions": _post("CompletionRequest", "Completion", _events("Completion")),
        "/v1/responses": _post("ResponsesRequest", None, _typed_events()),
        "/tokenize": _post("TokenizeRequest", "Tokenized"),
        "/detokenize": _post("DetokenizeRequest", "Detokenized"),
        "/v1/load_lora_adapter": _post("LoadAdapterRequest", "ModelCard"),
        "/v1/unload_lora_adapter": _post("UnloadAdapterRequest", "ModelDeleted"),
        "/v1/models": _get(_json("ModelList")),
        "/v1/models/{name}": _get(_json("ModelCard"), 404, parameters=[model]),
        "/health": _get(_json(), 503),
        "/ready": ready,
        "/version": _get(_json()),
        "/metrics": _get(_text(PLAIN, OPEN_METRICS), 503),
        "/openapi.json": _get(_json()),
        **{path: _get(_json(), 500) for path in debugging},
    }


def _get(content: dict[str, Any], *errors: int, **more: Any) -> dict[str, Any]:
    return {"get": {"responses": _responses(content, (*_GET_ERRORS, *errors)), **more}}


def _post(request: str, answer: str | None, events: dict[str, Any] | None = None) -> dict[str, Any]:
    content = _json(answer)
    if events is not None:
        content["text/event-stream"] = {"schema": events}
    return {
        "post": {
            "requestBody": {"required": True, "content": _json(request)},
            "responses": _responses(content, _POST_ERRORS),
        }
    }


def _json(name: str | None = None) -> dict[str, Any]:
    schema = {"type": "object"} if name is None else _ref(name)
    return {"application/json": {"schema": schema}}


def _text(*kinds: str) -> dict[str, Any]:
    return {kind: {"schema": {"type": "string"}} for kind in kinds}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


def _events(chunk: str) -> dict[str, Any]:
    return _event({"anyOf": [{"const": "[DONE]"}, _json_text(_ref(chunk))]})


def _typed_events() -> dict[str, Any]:
    typed = {
        "type": "object",
        "properties": {"type": {"type": "string"}, "sequence_number": {"type": "integer"}},
        "required": ["type", "sequence_number"],
    }
    return _event(_json_text(typed), event={"type": "string"})


def _json_text(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a text that holds JSON: what is answered, or the error that ends it."""
    kinds = [schema, _ref("ErrorBody")]
    of_json = {"contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    return {"type": "string", **of_json}


def _event(data: dict[str, Any], **more: dict[str, Any]) -> dict[str, Any]:
    properties = {"data": data, **more}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _responses(content: dict[str, Any], errors: tuple[int, ...]) -> dict[str, Any]:
    error = _json("ErrorBody")
    refusals = {str(code): _with_content(STATUSES[code].meaning, error) for code in errors}
    return {"200": _with_content("The answer.", content), **refusals}


def _with_content(description: str, content: dict[str, Any]) -> dict[str, Any]:
    header = {"schema": {"type": "string"}, "description": "That of the request, or a new one."}
    return {"description": description, "content": content, "headers": {"X-Request-Id": header}}
