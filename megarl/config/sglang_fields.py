"""The options that `generation.sglang` passes through, checked against the SGLang that will get them.

Its files are read, not imported: it may belong to another interpreter, and importing it takes ten seconds.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from megarl.config import catalogue
from megarl.config.annotations import accepts
from megarl.config.problems import KeyPath, Problem, dotted, show
from megarl.config.schema import RunConfig

# What megarl decides -> the setting that decides it; "" where there is none, because the rest depends on its value.
DECIDED_BY: dict[str, str] = {
    "model_path": "model.path",
    "tp_size": "generation.tp_size",
    "base_gpu_id": "generation.colocated",
    "tokenizer_path": "",
    "skip_tokenizer_init": "",
    "load_format": "",
    "host": "",
    "port": "",
    "api_key": "",
    "admin_api_key": "",
    "trust_remote_code": "",
    "skip_server_warmup": "",
    "device": "",
    "weight_version": "",
}
_SECTION: KeyPath = ("generation", "sglang")
_CLASS = "ServerArgs"
# Where its fields are: a class of its own, and since 0.5.21 one class for each file of a directory.
_OWN_FILE, _FIELD_FILES = "srt/server_args.py", "srt/arg_groups/fields/*.py"
# A field that is written ``A[type, help]``.
_WITH_HELP = ("A", "Annotated")


def check_sglang(config: RunConfig) -> Iterator[Problem]:
    """Options that SGLang does not have, that megarl sets itself, or whose value has the wrong type.

    Without the package only those that megarl sets are refused.
    """
    options = config.generation.sglang
    known = installed_sglang_fields(config.generation.python) if options else None
    for option, value in options.items():
        path = (*_SECTION, option)
        if option in DECIDED_BY:
            yield Problem("MRL-1012", f"{dotted(path)} is not yours to set.", (path,), (_instead(option),))
        elif known is None:
            continue
        elif option not in known:
            close = catalogue.closest(option, [name for name in known if name not in DECIDED_BY])
            meant = f" Did you mean {dotted((*_SECTION, close))}?" if close else ""
            hint = f"Options are the fields of its {_CLASS}."
            yield Problem(
                "MRL-1001", f"{dotted(path)} is not an option of the installed SGLang.{meant}", (path,), (hint,)
            )
        elif not accepts(known[option], value, foreign=True):
            kind = ast.unparse(known[option])
            yield Problem("MRL-1003", f"{dotted(path)}={show(value)} is not allowed. It must be {kind}.", (path,))


@cache
def installed_sglang_fields(python: str | None) -> dict[str, ast.expr] | None:
    """Option -> annotation, of the SGLang that this interpreter (None: ours) has; None if none is found."""
    for package in _packages(python):
        try:
            fields = dict(_fields(package))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        if fields:
            return fields
    return None


def _packages(python: str | None) -> Iterator[Path]:
    """Where the package may be. The interpreter is not run: its packages are found by where it lies."""
    if python is None:
        spec = importlib.util.find_spec("sglang")  # nothing of it is executed
        yield from map(Path, (spec.submodule_search_locations or ()) if spec else ())
        return
    program = shutil.which(python)
    if program is not None:
        # Links are not followed: in a virtual environment the interpreter is a link to the one that made it.
        yield from Path(program).absolute().parent.parent.glob("lib*/python3*/*-packages/sglang")


def _fields(package: Path) -> Iterator[tuple[str, ast.expr]]:
    for file in (package / _OWN_FILE, *sorted(package.glob(_FIELD_FILES))):
        is_own = file.name == Path(_OWN_FILE).name
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and (not is_own or node.name == _CLASS):
                yield from _fields_of(node)


def _fields_of(cls: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for statement in cls.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        kind = statement.annotation
        if isinstance(kind, ast.Subscript) and isinstance(kind.value, ast.Name):
            if kind.value.id == "ClassVar":
                continue
            if kind.value.id in _WITH_HELP and isinstance(kind.slice, ast.Tuple):
                kind = kind.slice.elts[0]
        if not statement.target.id.startswith("_"):
            yield statement.target.id, kind


def _instead(option: str) -> str:
    setting = DECIDED_BY[option]
    return f"Use {setting} instead." if setting else "megarl's own calls depend on it, so it is fixed. Remove the line."
