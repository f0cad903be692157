"""Whether a YAML value fits a type that is written in a vendor's source, which is read and never imported."""

from __future__ import annotations

import ast
from typing import Any

_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "None": (type(None),),
    "list": (list,), "List": (list,), "tuple": (list,), "Tuple": (list,), "dict": (dict,), "Dict": (dict,),
}  # fmt: skip


def accepts(annotation: ast.expr, value: Any, *, foreign: bool) -> bool:
    """Whether the value fits. What is inside lists and mappings is left to the vendor; ``foreign`` is the answer for
    types that are the vendor's own.
    """
    if isinstance(annotation, ast.Constant):
        if isinstance(annotation.value, str):  # an annotation in quotation marks
            return accepts(ast.parse(annotation.value, mode="eval").body, value, foreign=foreign)
        return annotation.value is None and value is None
    if isinstance(annotation, ast.Name):
        return type(value) in _PLAIN[annotation.id] if annotation.id in _PLAIN else foreign
    if isinstance(annotation, ast.BinOp):  # X | Y
        return any(accepts(side, value, foreign=foreign) for side in (annotation.left, annotation.right))
    if not isinstance(annotation, ast.Subscript) or not isinstance(annotation.value, ast.Name):
        return foreign
    inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    if annotation.value.id == "Literal":
        return any(isinstance(one, ast.Constant) and one.value == value for one in inner)
    if annotation.value.id == "Optional" and value is None:
        return True
    if annotation.value.id in ("Optional", "Union"):
        return any(accepts(one, value, foreign=foreign) for one in inner)
    return accepts(annotation.value, value, foreign=foreign)
