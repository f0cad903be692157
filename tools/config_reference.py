"""Writes docs/configuration.md from the schema: ``python tools/config_reference.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megarl.config.catalogue import ANY_ALGORITHM, Setting, settings
from megarl.config.problems import CODES

TARGET = Path(__file__).parent.parent / "docs" / "configuration.md"
MAX_KEYS = 250

# sections with the keys of another one -> that one, and what it means to leave them out
REPEATED = {
    ("critic", "parallel"): ("actor.parallel", "How one copy of the model is cut; null: like the actor."),
    ("reference", "parallel"): ("actor.parallel", "How one copy of the model is cut; null: like the actor."),
    ("reward_model", "parallel"): ("actor.parallel", "How one copy of the model is cut; null: like the actor."),
    ("eval", "bench_sets", "NAME"): (
        "eval.sets.NAME",
        "A set that is evaluated once, after the last step, and reported under bench/.",
    ),
}

INTRO = """\
# Configuration

<!-- Written by tools/config_reference.py. Change the schema (megarl/config/) or the tool, then run it. -->

A run is one YAML file. `megarl check run.yaml` tells in a second whether it is right, and shows the layout, the batch
arithmetic and what is on the device in each phase; `megarl train run.yaml` runs it. `configs/` has files to start from.

- **One parent.** `extends: base.yaml` (relative to the file it stands in) takes everything from another file, which may
  extend a third. Mappings are merged key by key and the child wins; lists and single values are replaced. `null` in the
  child switches off what the parent set.
- **Command line.** `megarl train run.yaml actor.optimizer.lr=1e-6 warmup=null` changes settings for one run. A value is
  read like YAML; it is merged by the same rules, after the files.
- **Values.** `1e-6` is a number. Only `true` and `false` are booleans; `yes`, `no`, `on` and `off` are text. Numbers
  with leading zeros are text. A key may be given once. Anchors, aliases, merge keys and tags are refused.
- **Paths** in settings are relative to the working directory.
- **What ran.** The run directory gets a `resolved.yaml`: every setting, defaults included. It is a configuration itself
  and repeats the run.
- **Mistakes** are reported all at once, with file and line, and end with exit code 64 (66 for a missing file) before
  anything is started.

"""


def reference() -> str:
    """The whole document."""
    merged = merged_settings()
    rows = [
        (
            f"`{'.'.join(one.path)}`",
            _cell(one.rule),
            f"`{one.default}`" if one.default else "required",
            _describe(one, who),
        )
        for one, who in merged
    ]
    codes = [(f"`{code}`", meaning) for code, meaning in CODES.items()]
    return (
        INTRO
        + f"## Settings\n\n{len(merged)} keys. `NAME` is a name of your choice, `N` a place in a list (from 0).\n\n"
        + _table(("Key", "Value", "Default", "What it is"), rows)
        + "\n## Error codes\n\nThe wording of a message may change; its code does not.\n\n"
        + _table(("Code", "Meaning"), codes)
    )


def merged_settings() -> list[tuple[Setting, tuple[str, ...]]]:
    """Every key once, with the algorithms that have it. What has the keys of another section is one key."""
    first: dict[tuple[str, ...], Setting] = {}
    owners: dict[tuple[str, ...], tuple[str, ...]] = {}
    for one in settings():
        section = next((path for path in REPEATED if one.path[: len(path)] == path), None)
        if section is not None:
            like, text = REPEATED[section]
            first.setdefault(section, replace(one, path=section, rule=f"the keys of {like}", description=text))
            first[section] = replace(first[section], default="null" if section[-1] == "parallel" else "{}")
            owners[section] = ANY_ALGORITHM
            continue
        owners[one.path] = owners.get(one.path, ()) + one.algorithms
        if one.path not in first or one.algorithms == ("custom",):  # custom has the full rule of algorithm.name
            first[one.path] = one
    return [(first[path], owners[path]) for path in first]


def _describe(one: Setting, owners: tuple[str, ...]) -> str:
    only = "" if set(owners) == set(ANY_ALGORITHM) or owners == ("custom",) else f" Only {', '.join(owners)}."
    return _cell(one.description + only)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
    print(f"wrote {TARGET} with {len(merged_settings())} keys (at most {MAX_KEYS})")
