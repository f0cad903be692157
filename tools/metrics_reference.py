"""Write the table of metrics in docs/metrics.md from the catalogue. Run it after changing the catalogue."""

from __future__ import annotations

import re
from pathlib import Path

from megarl.metrics.catalogue import CATALOGUE, Metric
from megarl.metrics.registry import expand

DOCUMENT = Path(__file__).parent.parent / "docs/metrics.md"
BEGIN = "<!-- begin: written by tools/metrics_reference.py -->\n"
END = "<!-- end -->\n"
_WHOSE = {"roll": "ROLL", "verl": "veRL", "verl-core": "veRL", "trinity": "Trinity-RFT", "base": "view `all` only"}


def table() -> str:
    """The catalogue as Markdown, one row per entry, every name spelled out so that a search finds it."""
    rows = ["| metric | unit | reduction | what it is | when | also called |", "|---|---|---|---|---|---|"]
    rows += [_row(family) for family in CATALOGUE]
    return "\n".join(rows) + "\n"


def rewritten(document: str) -> str:
    """The document with its table brought up to date."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _row(family: Metric) -> str:
    members = expand(family)
    names = "<br>".join(f"`{metric.name}`" for metric in members)
    reductions = ", ".join(dict.fromkeys(metric.reduction for metric in members))
    doc = re.sub(r"\{([^{}]*,[^{}]*)\}", lambda found: found[1].replace(",", "/"), family.doc).replace("|", "\\|")
    aliases = "<br>".join(f"`{spelling}` ({_WHOSE[key]})" for m in members for key, spelling in m.aliases.items())
    return f"| {names} | {family.unit} | {reductions} | {doc} | {family.when} | {aliases} |"


if __name__ == "__main__":
    DOCUMENT.write_text(rewritten(DOCUMENT.read_text()))
