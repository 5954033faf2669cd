"""The document for people, as one page without scripts: it works where nothing else can be reached."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request
from jinja2 import Environment
from starlette.responses import HTMLResponse

from tandem_api.routes.common import html

router = APIRouter(include_in_schema=False)
_PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ d.info.title }} {{ d.info.version }}: API</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 14px/1.45 ui-monospace, monospace; } pre { overflow-x: auto; padding: .6rem; }
summary { cursor: pointer; } details { margin: .4rem 0; } table { border-collapse: collapse; }
td, th { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; }
</style></head><body>
<h1>{{ d.info.title }} {{ d.info.version }}</h1><p>{{ d.info.description }}</p>
<p>The same for programs: <a href="/openapi.json">openapi.json</a>.</p>
{% for tag in d.tags %}
<h2>{{ tag.name }}</h2><p>{{ tag.description }}</p>
{% for path, method, o in operations if tag.name in o.tags %}
<details><summary><code><b>{{ method|upper }}</b> {{ path }}</code></summary>
<p>{{ o.description }}{% if o.security == [] %} Needs no token.{% endif %}</p>
{% if o.parameters %}<table><tr><th>parameter</th><th>in</th><th></th></tr>
{% for p in o.parameters %}<tr><td><code>{{ p.name }}</code></td><td>{{ p.in }}</td>
<td>{{ p.description or "" }}{% if p.required %} Required.{% endif %}</td></tr>{% endfor %}</table>{% endif %}
{% if o.requestBody %}<p>Body:</p><pre>{{ shown(o.requestBody) }}</pre>{% endif %}
{% for status, answer in o.responses.items() %}
<p><b>{{ status }}</b> {{ answer.description }}</p>
{% if status|string < "300" %}{% for kind, content in (answer.content or {}).items() if content.example %}
<pre>{{ shown(content.example) }}</pre>{% endfor %}{% endif %}
{% endfor %}</details>
{% endfor %}{% endfor %}
</body></html>
"""
)


@router.get("/docs")
async def page(request: Request) -> HTMLResponse:
    """Every route with its parameters and answers."""
    document = request.app.openapi()
    operations = [(path, method, o) for path, item in document["paths"].items() for method, o in item.items()]
    text = _PAGE.render(d=document, operations=operations, shown=_shown)
    return html(text, {"Cache-Control": "no-cache"})


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False)
