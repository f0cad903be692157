"""From data to one HTML file that loads nothing: scripts, styles and data stand in the page.

Foreign text (prompts, responses, settings, metric names) is only ever data: it stands in a JSON block in which no ``<``
can end the block, and the scripts put it into the page as text. The content security policy allows the page's own
scripts by their hashes and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from typing import Any

_SCRIPTS = (
    "uplot/uPlot.iife.min.js", "dom.js", "chart.js", "curves.js", "step_time.js", "timeline.js", "memory.js",
    "tables.js", "metrics.js", "samples.js", "main.js",
)  # fmt: skip
_STYLES = ("uplot/uPlot.min.css", "report.css")
# id and heading of every section, in their order
SECTIONS = (
    ("comparison", "Comparison"),
    ("curves", "Learning curves"),
    ("step-time", "Where the time goes"),
    ("timeline", "Timeline of one step"),
    ("memory", "Memory"),
    ("alerts", "Alerts"),
    ("samples", "Samples"),
    ("metrics", "All metrics"),
    ("config", "Configuration"),
    ("devices", "Devices"),
)


def render(data: dict[str, Any]) -> str:
    """The whole page."""
    shown = [(name, title) for name, title in SECTIONS if name != "comparison" or len(data["runs"]) > 1]
    scripts = [_script(name) for name in _SCRIPTS]
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f'script-src {hashes}; img-src data:">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{_text(data['runs'][0]['name'])} - megarl report</title>",
        f"<!-- uPlot 1.6.32:\n{_asset('uplot/LICENSE')}-->",
        *(f"<style>{_asset(name)}</style>" for name in _STYLES),
        '</head>\n<body>\n<a class="skip" href="#content">Skip to the content</a>',
        '<header id="top"><div id="identity"></div><nav aria-label="Sections">',
        *(f'<a href="#{name}">{title}</a>' for name, title in shown),
        '</nav></header>\n<main id="content">',
        "<noscript><p>This page draws its charts with scripts, which are switched off.</p></noscript>",
        '<div id="tiles"></div>',
        *(f'<section id="{name}"><h2>{title}</h2><div class="content"></div></section>' for name, title in shown),
        "</main>\n<footer></footer>",
        f'<script type="application/json" id="data">{_json(data)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _json(data: dict[str, Any]) -> str:
    """JSON whose text cannot be taken for the end of the block, or for a comment."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _text(text: str) -> str:
    """Escaped; half a surrogate pair, which no file can hold, becomes a number."""
    return escape(text).encode("ascii", "xmlcharrefreplace").decode("ascii")


def _script(name: str) -> str:
    """Without the banner of the vendored script, whose address is no part of the page; the licence stands above."""
    text = _asset(name)
    return text.partition("*/\n")[2] if text.startswith("/*!") else text


def _asset(name: str) -> str:
    return files("megarl.report").joinpath("assets", *name.split("/")).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
