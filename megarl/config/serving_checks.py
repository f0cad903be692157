"""Settings of engines, servers and rollouts that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.algorithms import SftSettings
from megarl.config.problems import KeyPath, Problem
from megarl.config.rollout import RolloutSettings
from megarl.config.schema import RunConfig

_ENGINE: KeyPath = ("generation", "engine")
_NUM_SERVERS: KeyPath = ("generation", "num_servers")
_URLS: KeyPath = ("generation", "urls")
_COLOCATED: KeyPath = ("generation", "colocated")
_TRANSPORT: KeyPath = ("weights", "transport")
_STALENESS: KeyPath = ("rollout", "max_staleness")
_EXTRA: KeyPath = ("rollout", "extra_prompts")
_UNFINISHED: KeyPath = ("rollout", "unfinished")
_REPLAY: KeyPath = ("rollout", "replay")
_ONLY: KeyPath = ("rollout", "only")
_GET_SERVERS = "Set generation.num_servers (embedded), generation.urls, or generation.engine: sglang."


def check_serving(config: RunConfig) -> Iterator[Problem]:
    """Every contradiction among them."""
    yield from _engines(config)
    yield from _transport(config)
    if config.rollout is not None:
        yield from _replay(config, config.rollout)
        yield from _staleness(config, config.rollout)
        yield from _long_tails(config, config.rollout)


def _contradiction(text: str, hint: str, *keys: KeyPath) -> Problem:
    return Problem("MRL-1005", text, keys, (hint,))


def _engines(config: RunConfig) -> Iterator[Problem]:
    own = config.generation
    if own.urls and own.num_servers:
        yield _contradiction(
            f"generation.urls names servers that are there, and generation.num_servers={own.num_servers} starts some.",
            "Keep one of the two.",
            _URLS,
            _NUM_SERVERS,
        )
    if len(set(own.urls)) < len(own.urls):
        twice = next(url for url in own.urls if own.urls.count(url) > 1)
        yield _contradiction(f"generation.urls names {twice} twice.", "Name each server once.", _URLS)
    if own.engine == "embedded":
        for name, is_set in (
            ("tp_size", own.tp_size > 1),
            ("router", own.router is not None),
            ("python", own.python is not None),
            ("sglang", bool(own.sglang)),
        ):
            if is_set:
                key: KeyPath = ("generation", name)
                hint = f"Set generation.engine: sglang, or remove generation.{name}."
                yield _contradiction(f"generation.{name} is for SGLang; the engine is embedded.", hint, key, _ENGINE)
    started = max(1, own.num_servers) if not own.urls else len(own.urls)
    if config.uses_servers and own.min_servers > started and (own.urls or own.num_servers):
        yield _contradiction(
            f"generation.min_servers={own.min_servers} is more than the {started} servers that there are.",
            f"Set generation.min_servers to at most {started}.",
            ("generation", "min_servers"),
            _URLS if own.urls else _NUM_SERVERS,
        )


def _transport(config: RunConfig) -> Iterator[Problem]:
    transport = config.weights.transport
    if transport == "inprocess" and config.uses_servers:
        hint = "Set weights.transport to tensor, broadcast, disk or auto."
        yield _contradiction(
            "weights.transport=inprocess reaches engines inside the ranks; these are servers.", hint, _TRANSPORT
        )
    if transport in ("tensor", "broadcast", "disk") and config.generates and not config.uses_servers:
        yield _contradiction(
            f"weights.transport={transport} reaches servers; there are engines inside the ranks.",
            f"Set weights.transport: auto. Or: {_GET_SERVERS}",
            _TRANSPORT,
            _NUM_SERVERS,
        )


def _replay(config: RunConfig, rollout: RolloutSettings) -> Iterator[Problem]:
    if isinstance(config.algorithm, SftSettings):
        for name, is_set in (
            ("replay", rollout.replay is not None),
            ("only", rollout.only),
            ("record", rollout.record),
        ):
            if is_set:
                yield _contradiction(
                    f"rollout.{name} is for algorithms that learn from samples; sft does not.",
                    f"Remove rollout.{name}.",
                    ("rollout", name),
                    ("algorithm", "name"),
                )
        return
    if rollout.replay is not None and rollout.only:
        yield _contradiction(
            "rollout.replay trains without generating, rollout.only generates without training.",
            "Keep one of the two.",
            _REPLAY,
            _ONLY,
        )
    if rollout.only and config.warmup is not None:
        yield _contradiction(
            "rollout.only trains nothing, but there is a warmup.",
            "Set warmup: null, or rollout.only: false.",
            _ONLY,
            ("warmup",),
        )


def _staleness(config: RunConfig, rollout: RolloutSettings) -> Iterator[Problem]:
    stale = rollout.max_staleness
    if not stale or rollout.replay is not None:
        return
    if not config.uses_servers:
        yield _contradiction(
            f"rollout.max_staleness={stale} draws samples while the trainer trains; engines inside the ranks cannot.",
            f"{_GET_SERVERS} And set generation.colocated: false.",
            _STALENESS,
            _NUM_SERVERS,
        )
    elif config.generation.colocated and rollout.unfinished != "carry_over":
        yield _contradiction(
            f"rollout.max_staleness={stale} draws samples while the trainer trains; colocated servers cannot.",
            "Set generation.colocated: false.",
            _STALENESS,
            _COLOCATED,
        )


def _long_tails(config: RunConfig, rollout: RolloutSettings) -> Iterator[Problem]:
    if rollout.extra_prompts and rollout.replay is None and not config.uses_servers:
        yield _contradiction(
            f"rollout.extra_prompts={rollout.extra_prompts} stops servers early; there are engines inside the ranks.",
            _GET_SERVERS,
            _EXTRA,
            _NUM_SERVERS,
        )
    if rollout.unfinished == "carry_over" and rollout.replay is None:
        if not rollout.extra_prompts:
            yield _contradiction(
                "rollout.unfinished=carry_over, but every group is waited for.",
                "Set rollout.extra_prompts to 1 or more, or remove rollout.unfinished.",
                _UNFINISHED,
                _EXTRA,
            )
        if not rollout.max_staleness:
            yield _contradiction(
                "rollout.unfinished=carry_over trains on samples that older weights began, "
                "which rollout.max_staleness=0 forbids.",
                "Set rollout.max_staleness to 1 or more.",
                _UNFINISHED,
                _STALENESS,
            )
