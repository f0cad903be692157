"""Configurations to start from, for the tests of the config package."""

from __future__ import annotations

from pathlib import Path

from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"

MINIMAL = """\
run:
  name: small
  num_steps: 10
model:
  tokenizer: builtin:characters
  config:
    architectures: [Qwen3ForCausalLM]
    vocab_size: 64
    hidden_size: 128
    intermediate_size: 384
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    max_position_embeddings: 128
algorithm:
  name: grpo
rollout:
  max_new_tokens: 44
data:
  train: builtin:carry
"""


def load_text(directory: Path, text: str, *overrides: str) -> RunConfig:
    """Load ``text`` as ``run.yaml``."""
    path = directory / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def refusal(directory: Path, text: str, *overrides: str) -> str:
    """The message with which ``text`` is refused, with the directory cut off file names."""
    try:
        load_text(directory, text, *overrides)
    except ConfigError as error:
        return str(error).replace(f"{directory}/", "")
    raise AssertionError("the configuration was accepted")
