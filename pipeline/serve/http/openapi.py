"""The description of the server in OpenAPI's form, and a page that shows it. The page loads nothing from elsewhere."""

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pipeline.serve.http.errors import JsonObject, json_response
from pipeline.serve.http.openai_requests import ChatRequest, CompletionRequest

REFERENCE = "#/components/schemas/{model}"
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = "body{font-family:sans-serif;margin:2em}td,th{text-align:left;padding:.2em 1em .2em 0;vertical-align:top}"


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the description of an endpoint's body, for `openapi_extra`: the endpoint parses it itself."""
    schema = {"$ref": REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_description(app: FastAPI) -> None:
    """Serve `/openapi.json` and `/docs`. Call it after all other routes were added."""
    described = _describe(app)
    page = _render(described)

    @app.get("/openapi.json", include_in_schema=False)
    async def show_description() -> Response:
        return json_response(described)

    @app.get("/docs", include_in_schema=False)
    async def show_page() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": CONTENT_POLICY})


def _describe(app: FastAPI) -> JsonObject:
    described: JsonObject = get_openapi(title="omnidraft", version="v1", routes=app.routes)
    _, schemas = models_json_schema(
        [(CompletionRequest, "validation"), (ChatRequest, "validation")], ref_template=REFERENCE
    )
    for path in _mapping(described["paths"]).values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # FastAPI's own; errors here have OpenAI's form
    described["components"] = {"schemas": schemas["$defs"]}
    return described


def _mapping(value: object) -> Mapping[str, Any]:
    assert isinstance(value, dict)
    return value


def _render(described: JsonObject) -> str:
    """Write the description as one page: a table of endpoints, and one of the parameters of each body."""
    schemas = _mapping(_mapping(described["components"])["schemas"])
    endpoints = [
        (method.upper(), path, operation.get("summary", ""))
        for path, operations in _mapping(described["paths"]).items()
        for method, operation in operations.items()
    ]
    parts = [_table(("method", "path", ""), endpoints)]
    for kind in (CompletionRequest, ChatRequest):
        schema, summary = schemas[kind.__name__], (kind.__doc__ or "").partition(". ")[0]
        rows = _list_parameters(schema)
        parts += [f"<h2>{escape(summary.strip('.'))}</h2>", _table(("parameter", "type", "bounds", "default"), rows)]
    body = "\n".join(parts)
    return f"<!doctype html><html lang=en><title>omnidraft</title><style>{STYLE}</style><h1>omnidraft</h1>\n{body}\n"


def _list_parameters(schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, field in schema["properties"].items():
        forms = [form for form in field.get("anyOf", [field]) if form.get("type") != "null"]
        kinds = " or ".join(form.get("type", form.get("$ref", "any").rpartition("/")[2]) for form in forms)
        names = ("minimum", "exclusiveMinimum", "maximum", "maxItems", "maxProperties", "maxLength")
        bounds = ", ".join(f"{bound} {form[bound]}" for form in forms for bound in names if bound in form)
        default = "required" if name in schema.get("required", ()) else str(field.get("default", ""))
        yield name, kinds, bounds, default


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
