"""Settings that contradict conversations of several turns."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.problems import KeyPath, Problem
from megarl.config.schema import RunConfig

_CONVERSE: KeyPath = ("rollout", "converse")


def check_converse_settings(config: RunConfig) -> Iterator[Problem]:
    """Every contradiction with ``rollout.converse``."""
    rollout = config.rollout
    if rollout is None or rollout.converse is None:
        if any(reward.name == "outcome" for reward in config.reward):
            yield _contradiction(
                "reward=outcome is what a conversation's function returns, but there is no rollout.converse.",
                'Set rollout.converse: "package.module:function", or choose another reward.',
                ("reward", "name"),
                _CONVERSE,
            )
        return
    for name, value in (("max_staleness", rollout.max_staleness), ("extra_prompts", rollout.extra_prompts)):
        if value and rollout.replay is None:
            yield _contradiction(
                f"rollout.{name}={value} leaves samples for later steps; conversations (rollout.converse) are always "
                "finished in their own step.",
                f"Set rollout.{name}: 0",
                ("rollout", name),
                _CONVERSE,
            )
    per_turn = rollout.converse.max_turn_tokens
    if per_turn is not None and per_turn > rollout.max_new_tokens:
        yield _contradiction(
            f"rollout.converse.max_turn_tokens={per_turn} is more than a whole conversation may have: "
            f"rollout.max_new_tokens={rollout.max_new_tokens}.",
            f"Set rollout.converse.max_turn_tokens to at most {rollout.max_new_tokens}, or to null.",
            (*_CONVERSE, "max_turn_tokens"),
            ("rollout", "max_new_tokens"),
        )


def _contradiction(text: str, hint: str, *keys: KeyPath) -> Problem:
    return Problem("MRL-1005", text, keys, (hint,))
