"""Writing a configuration down in full, so that it can be read back to the same configuration."""

from __future__ import annotations

import yaml

from megarl.config.document import BOOL, FLOAT, INT, NULL
from megarl.config.schema import RunConfig


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that `read_scalar` would take for something else."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, object]]] = {  # noqa: RUF012 (PyYAML's own attribute)
        None: [
            ("tag:yaml.org,2002:null", NULL),
            ("tag:yaml.org,2002:bool", BOOL),
            ("tag:yaml.org,2002:int", INT),
            ("tag:yaml.org,2002:float", FLOAT),
        ]
    }

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 (PyYAML's signature)
        """Never write an alias: it would be refused on reading."""
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Quote what PyYAML would not: Unicode line breaks, which it reads back as spaces, and a key that means merging."""
    style = '"' if text == "<<" or any(character in text for character in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump_resolved(config: RunConfig) -> str:
    """The whole configuration as YAML: no ``extends``, every default explicit. Loading it gives an equal config."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
