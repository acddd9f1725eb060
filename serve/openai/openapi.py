"""`/openapi.json`: what is accepted and answered, from the structs.

A request's schema is its struct's, bounds included. Each field may also be null, which is the same
as leaving it out; inert fields are there with the values that they are accepted at, ignored ones
without a type; nothing else is accepted. An answer's schema is its struct's.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import msgspec

from model.fields import hints_of
from serve.observe import page
from serve.openai import responses, schema
from serve.openai.backend import ApiSettings
from serve.openai.fields import ignored_fields, inert_fields, structs_within
from serve.openai.responses_request import ResponsesRequest
from serve.openai.tokenizing import DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{name}"
_REQUESTS = (
    schema.ChatRequest,
    schema.CompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_ANSWERS = (
    responses.ChatCompletion,
    responses.ChatChunk,
    responses.Completion,
    responses.ModelList,
    responses.ModelCard,
    responses.Tokenized,
    responses.Detokenized,
)

ERRORS = {
    400: "The request cannot be answered; `param` names the field.",
    401: "A key is needed, or another one.",
    403: "A web page of another origin.",
    404: "There is no such path or model.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    429: "There is no room; Retry-After says when there may be.",
    500: "The server failed.",
    503: "The model is not ready; Retry-After says when to ask again.",
    504: "The answer was not finished in time.",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error."""

    error: ErrorDetail


def document(settings: ApiSettings) -> bytes:
    """Return the JSON text."""
    structs = (*_REQUESTS, *_ANSWERS, ErrorBody)
    _, components = msgspec.json.schema_components(structs, ref_template=_REF)
    for struct in dict.fromkeys(each for request in _REQUESTS for each in _with_parts(request)):
        _describe_fields(components[struct.__name__], struct)
    _describe_what_is_checked_later(components, settings)
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
    """Yield a struct, and those that its fields hold."""
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


def _describe_what_is_checked_later(components: dict[str, Any], settings: ApiSettings) -> None:
    """Add what depends on the model."""
    length = {"type": "integer", "minimum": 1, "maximum": settings.max_model_len}
    of = {name: found["properties"] for name, found in components.items() if "properties" in found}
    for request in _REQUESTS:
        of[request.__name__]["model"] = {"enum": [*settings.model_names, None]}
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
    json_object = {"application/json": {"schema": {"type": "object"}}}

    def posts(
        request: str, answer: str | None, events: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        content: dict[str, Any] = dict(json_object)
        if answer is not None:
            content = {"application/json": {"schema": {"$ref": _REF.format(name=answer)}}}
        if events is not None:
            content["text/event-stream"] = {"schema": events}
        body = {"schema": {"$ref": _REF.format(name=request)}}
        return {
            "post": {
                "requestBody": {"required": True, "content": {"application/json": body}},
                "responses": _responses(content, tuple(ERRORS)),
            }
        }

    def gets(content: dict[str, Any], *errors: int, **more: Any) -> dict[str, Any]:
        return {"get": {"responses": _responses(content, errors), **more}}

    model = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    card = {"application/json": {"schema": {"$ref": _REF.format(name="ModelCard")}}}
    models = {"application/json": {"schema": {"$ref": _REF.format(name="ModelList")}}}
    text = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", _OPEN_METRICS)}
    ready = gets(json_object, 400, 401, 403)
    ready["get"]["responses"]["503"] = _with_content("Not ready, and how far it is.", json_object)
    files = {
        path: gets({kind: {"schema": {"type": "string"}}}, 400, 401, 403)
        for path, (_, kind) in page.FILES.items()
    }
    paths = {
        **files,
        "/status": gets(json_object, 400, 401, 403),
        "/v1/chat/completions": posts("ChatRequest", "ChatCompletion", _events("ChatChunk")),
        "/v1/completions": posts("CompletionRequest", "Completion", _events("Completion")),
        "/v1/responses": posts("ResponsesRequest", None, _typed_events()),
        "/tokenize": posts("TokenizeRequest", "Tokenized"),
        "/detokenize": posts("DetokenizeRequest", "Detokenized"),
        "/v1/models": gets(models, 400, 401, 403),
        "/v1/models/{name}": gets(card, 400, 401, 403, 404, parameters=[model]),
        "/health": gets(json_object, 400, 401, 403, 503),
        "/ready": ready,
        "/version": gets(json_object, 400, 401, 403),
        "/metrics": gets(text, 400, 401, 403, 503),
        "/openapi.json": gets(json_object, 400, 401, 403),
    }
    if settings.args.debug:
        for path in ("/debug/ranks", "/debug/ingress"):
            paths[path] = gets(json_object, 400, 401, 403, 500)
    return paths


_OPEN_METRICS = "application/openmetrics-text"


def _events(chunk: str) -> dict[str, Any]:
    """Return the schema of one event of a stream, as OpenAPI 3.1 describes streams."""
    return _event({"anyOf": [{"const": "[DONE]"}, _json_text({"$ref": _REF.format(name=chunk)})]})


def _typed_events() -> dict[str, Any]:
    typed = {
        "type": "object",
        "properties": {"type": {"type": "string"}, "sequence_number": {"type": "integer"}},
        "required": ["type", "sequence_number"],
    }
    return _event(_json_text(typed), event={"type": "string"})


def _json_text(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a text that holds JSON: what is answered, or the error that ends it."""
    kinds = [schema, {"$ref": _REF.format(name="ErrorBody")}]
    of_json = {"contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    return {"type": "string", **of_json}


def _event(data: dict[str, Any], **more: dict[str, Any]) -> dict[str, Any]:
    properties = {"data": data, **more}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _responses(content: dict[str, Any], errors: tuple[int, ...]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(name="ErrorBody")}}}
    answers = {str(code): _with_content(ERRORS[code], error) for code in errors}
    return {"200": _with_content("The answer.", content), **answers}


def _with_content(description: str, content: dict[str, Any]) -> dict[str, Any]:
    header = {"schema": {"type": "string"}, "description": "That of the request, or a new one."}
    return {"description": description, "content": content, "headers": {"X-Request-Id": header}}
