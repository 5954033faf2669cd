"""The OpenAPI document: what FastAPI makes of the routes, completed. ``python -m tandem_api.openapi`` writes it out."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from tandem_api.problems import ProblemDetails
from tandem_api.security.sessions import CSRF_HEADER, SECURE_COOKIE

FILE = Path("docs/openapi.json")
SUMMARY = "Finds silent data corruption in accelerator nodes."
DESCRIPTION = (
    "Launches runs that compare a suspect node with a healthy one bit by bit, reads what they found, and streams it "
    "while it happens. Times are UTC seconds. Every error is `application/problem+json` (RFC 9457). Lists come in "
    "pages: send `next_page_token` back as `page_token`. Tokens and rights: see docs/api.md."
)
TAGS: list[dict[str, Any]] = [
    {"name": "runs", "description": "Begin, list, look at and cancel runs; their records in pages."},
    {"name": "events", "description": "A run as it happens, by server-sent events."},
    {"name": "export", "description": "Tables of a run as CSV and Parquet files."},
    {"name": "nodes", "description": "What the records say of nodes, and decisions about them."},
    {"name": "candidates", "description": "Nodes that wait for a test, and their partners."},
    {"name": "catalogue", "description": "Presets and fault profiles."},
    {"name": "health", "description": "Probes and metrics; without a token."},
]


SESSION: dict[str, dict[str, Any]] = {
    "Session": {
        "type": "apiKey", "in": "cookie", "name": SECURE_COOKIE,
        "description": "Of a browser that has signed in to the console; where it is reached by HTTP its name is "
        "`tandem-session-` and the port. It counts only without an `Authorization` header.",
    },
    "SessionCSRF": {
        "type": "apiKey", "in": "header", "name": CSRF_HEADER,
        "description": "What a session's write must carry: the field `csrf` of the console's forms, sent from a page "
        "of this server's own origin.",
    },
}  # fmt: skip
"""The console's sessions, beside bearer tokens."""


def install(app: FastAPI) -> None:
    """Make the application serve this document as its own."""
    made: dict[str, Any] = {}
    making = threading.Lock()  # seconds of work: the first requests of a server come together, in threads of their own

    def document() -> dict[str, Any]:
        with making:
            if not made:
                made.update(_complete(app))
        return made

    app.openapi = document  # type: ignore[method-assign]


def _complete(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(
        title=app.title, version=app.version, summary=app.summary, description=app.description, routes=app.routes,
        tags=app.openapi_tags, license_info=app.license_info, separate_input_output_schemas=False,
        servers=[{"url": "/", "description": "Where the document came from."}],
    )  # fmt: skip
    schemas = found["components"]["schemas"]
    problem = ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= problem.pop("$defs", {})
    schemas["ProblemDetails"] = problem
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _whole_numbers(found)
    found["components"]["securitySchemes"] |= SESSION
    for path, item in found["paths"].items():
        for method, operation in item.items():
            if operation.get("security"):  # either of them will do
                operation["security"].append({"Session": []} if method == "get" else {name: [] for name in SESSION})
            operation["operationId"] = _operation(operation["operationId"], path)
            for answer in operation["responses"].values():
                for content in answer.get("content", {}).values():
                    _example(content, schemas)
    return found


def _whole_numbers(node: Any) -> None:
    """The framework writes bounds as floats, and a large one so that no integer is meant."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, (dict, list)):
            _whole_numbers(value)
        elif key in _BOUNDS and isinstance(value, float) and value.is_integer():
            node[key] = int(value)


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _operation(generated: str, path: str) -> str:
    """The function's name alone: generated clients name their methods by it."""
    tail = path.replace("{", "_").replace("}", "_").replace("/", "_").replace("-", "_")
    return generated.split(tail, maxsplit=1)[0].rstrip("_") or generated


def _example(content: dict[str, Any], schemas: dict[str, Any]) -> None:
    """An example of every answer, put together from those of its fields."""
    schema = content.get("schema", {})
    if "$ref" in schema and "example" not in content:
        content["example"] = example(schema, schemas)


def example(schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    """A value of a schema, from the examples in it."""
    if schema.get("examples"):
        return schema["examples"][0]
    if "$ref" in schema:
        return example(schemas[schema["$ref"].rsplit("/", 1)[1]], schemas)
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return example(schema[choice][0], schemas)
    if "const" in schema:
        return schema["const"]
    if "default" in schema:
        return schema["default"]
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            if isinstance(more := schema.get("additionalProperties"), dict) and "properties" not in schema:
                return {"1": example(more, schemas)}
            return {name: example(part, schemas) for name, part in schema.get("properties", {}).items()}
        case "array":
            return [example(schema["items"], schemas)] if "items" in schema else []
        case "string":
            return "text"
        case "integer":
            return 1
        case "number":
            return 1.0
        case "boolean":
            return True
    return None


def text() -> str:
    """The committed document."""
    return json.dumps(bare_app().openapi(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def bare_app() -> FastAPI:
    """The application without parts: it has routes and answers nothing."""
    from fastapi import FastAPI as Bare

    import tandem
    from tandem_api.routers import ROUTERS

    app = Bare(
        title="Tandem", version=tandem.__version__, summary=SUMMARY, description=DESCRIPTION, openapi_tags=TAGS,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )  # fmt: skip
    for router in ROUTERS:
        app.include_router(router)
    install(app)
    return app


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
