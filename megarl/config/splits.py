"""Whether a model can be cut as asked: the rules of Megatron-Core, each refusal with its arithmetic and a way out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megarl.config.model_shape import ExpertShape, ModelShape
from megarl.config.nearest import balanced_stages, divisors, nearest_layout, tensor_parts
from megarl.config.parallel import ParallelSettings
from megarl.config.problems import KeyPath, Problem, dotted

_NUM_RANKS: KeyPath = ("run", "num_ranks")
_SHOWN = 16


@dataclass(frozen=True, slots=True)
class Role:
    """A model of the run, and how it is cut. ``path`` is where the layout is written, which may be the actor's.

    ``shape`` is None if it cannot be read. ``model`` are the settings that say which model it is.
    """

    name: str
    parallel: ParallelSettings
    path: KeyPath
    shape: ModelShape | None
    model: KeyPath

    def key(self, size: str) -> KeyPath:
        """Where a size of the layout is written."""
        return (*self.path, size)

    @property
    def words(self) -> str:
        """The model in a sentence."""
        return "this model" if self.model == ("model",) else f"the model of {dotted(self.model)}"

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """What the number of ranks must be a multiple of."""
        parallel = self.parallel
        if self.shape is None or self.shape.experts is None:
            return (parallel.model_parallel_size,)
        return parallel.model_parallel_size, parallel.pp_size * parallel.ep_size * parallel.expert_tp_size


def check_splits(roles: list[Role], num_ranks: int) -> list[Problem]:
    """Everything that does not divide, for every role; the first problem of a role says what layout would do."""
    unit = math.lcm(*(size for role in roles for size in role.group_sizes))
    problems: list[Problem] = []
    for role in roles:
        found = [*_replicas(role, num_ranks, unit)]
        if role.shape is not None:
            found += _tensors(role, role.shape, num_ranks)
            found += _stages(role, role.shape, num_ranks)
            found += _experts(role, role.shape, num_ranks, unit)
            found += _sequence(role, role.shape)
            if found:
                found[0] = _with_way_out(found[0], role, role.shape, num_ranks)
        problems += found
    return problems


def _with_way_out(problem: Problem, role: Role, shape: ModelShape, num_ranks: int) -> Problem:
    asked, fits = role.parallel.model_dump(), nearest_layout(role.parallel, shape, num_ranks).model_dump()
    changes = ", ".join(f"{key}: {_yaml(value)}" for key, value in fits.items() if value != asked[key])
    whole = f"Nearest layout that fits {num_ranks} ranks: {dotted(role.path)}: {{{changes}}}"
    return replace(problem, hints=(*problem.hints, whole))


def _yaml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return "null" if value is None else str(value)


def _replicas(role: Role, num_ranks: int, unit: int) -> Iterator[Problem]:
    parallel, per_replica = role.parallel, role.parallel.model_parallel_size
    if num_ranks % per_replica == 0:
        return
    names = ("tp_size", "pp_size", "cp_size") if parallel.cp_size > 1 else ("tp_size", "pp_size")
    product = " x ".join(f"{name} {getattr(parallel, name)}" for name in names)
    whose = "" if role.name == "actor" else f" of the {role.name}"
    yield Problem(
        "MRL-1101",
        f"run.num_ranks={num_ranks} is not a whole number of model replicas{whose}: "
        f"{product} = {per_replica} ranks per replica, {num_ranks} / {per_replica} = {num_ranks / per_replica:.4g}.",
        (_NUM_RANKS, *(role.key(name) for name in names)),
        (
            f"Nearest run.num_ranks: {_multiples_near(num_ranks, unit)}. "
            f"Or choose {' x '.join(names)} from: {join(divisors(num_ranks))}.",
        ),
    )


def _tensors(role: Role, shape: ModelShape, num_ranks: int) -> Iterator[Problem]:
    tp_size = role.parallel.tp_size
    parts = tensor_parts(shape)
    broken = [f"{size} {part} / {tp_size}" for part, size in parts.items() if size % tp_size]
    if not broken:
        return
    verb = "is" if len(broken) == 1 else "are"
    other = role.parallel.pp_size * role.parallel.cp_size
    valid = _valid_sizes(math.gcd(*parts.values()), num_ranks, other)
    yield Problem(
        "MRL-1102",
        f"{dotted(role.key('tp_size'))}={tp_size} cannot split {role.words}: {' and '.join(broken)} {verb} not whole.",
        (role.key("tp_size"), role.model),
        (f"Valid here: {join(valid)}.",),
    )


def _stages(role: Role, shape: ModelShape, num_ranks: int) -> Iterator[Problem]:
    parallel, layers = role.parallel, shape.num_layers
    if parallel.vpp_size > 1 and parallel.pp_size == 1:
        yield _without_pipeline(role, layers, num_ranks)
    elif parallel.stage_layers is not None:
        yield from _given_stages(role, parallel.stage_layers, layers)
    elif layers % parallel.num_stages:
        yield _unequal_stages(role, layers, num_ranks)


def _without_pipeline(role: Role, layers: int, num_ranks: int) -> Problem:
    vpp_size = role.parallel.vpp_size
    larger = [size for size in _pipelines(role, layers, num_ranks) if size > 1]
    instead = f", or pp_size to one of: {join(larger)}" if larger else ""
    return Problem(
        "MRL-1112",
        f"{dotted(role.key('vpp_size'))}={vpp_size} needs a pipeline: "
        f"all pp_size 1 x vpp_size {vpp_size} = {vpp_size} stages would be on the same ranks.",
        (role.key("vpp_size"), role.key("pp_size")),
        (f"Set vpp_size: 1{instead}.",),
    )


def _unequal_stages(role: Role, layers: int, num_ranks: int) -> Problem:
    pp_size, vpp_size, num_stages = role.parallel.pp_size, role.parallel.vpp_size, role.parallel.num_stages
    interleaved = f" x vpp_size {vpp_size}" if vpp_size > 1 else ""
    valid = _pipelines(role, layers, num_ranks)
    hints = [f"Valid here: {join(valid)}."] if valid else []
    if vpp_size > 1 and layers % pp_size == 0:
        hints.append(f"With pp_size {pp_size}, vpp_size may be: {join(divisors(layers // pp_size))}.")
    if num_stages <= layers:
        hints.append(f"Or write uneven stages: stage_layers: {_yaml(balanced_stages(layers, num_stages))}")
    if not hints:
        hints.append(f"Set vpp_size: 1, and pp_size to one of: {join(divisors(layers))}.")
    return Problem(
        "MRL-1103",
        f"{dotted(role.key('pp_size'))}={pp_size}{interleaved} cannot split {role.words}: "
        f"{layers} layers / {num_stages} is not whole.",
        (role.key("pp_size"), role.key("vpp_size"), role.model),
        tuple(hints),
    )


def _pipelines(role: Role, layers: int, num_ranks: int) -> list[int]:
    """Pipeline-parallel sizes that give equal stages with the vpp_size that was asked for."""
    vpp_size = role.parallel.vpp_size
    if layers % vpp_size:
        return []
    sizes = _valid_sizes(layers // vpp_size, num_ranks, role.parallel.tp_size * role.parallel.cp_size)
    return [size for size in sizes if size > 1 or vpp_size == 1]


def _given_stages(role: Role, given: tuple[int, ...], layers: int) -> Iterator[Problem]:
    parallel = role.parallel
    num_stages = parallel.num_stages
    if len(given) == num_stages and sum(given) == layers:
        return
    text = f"{dotted(role.key('stage_layers'))} has {len(given)} stages with {sum(given)} layers in all, but "
    text += f"pp_size {parallel.pp_size} x vpp_size {parallel.vpp_size} = {num_stages} stages and "
    text += f"{role.words} has {layers} layers."
    if num_stages <= layers:
        hint = f"Write stage_layers: {_yaml(balanced_stages(layers, num_stages))}"
    else:
        hint = f"Use at most {layers} stages: every stage has a layer."
    yield Problem("MRL-1115", text, (role.key("stage_layers"), role.key("pp_size"), role.key("vpp_size")), (hint,))


def _experts(role: Role, shape: ModelShape, num_ranks: int, unit: int) -> Iterator[Problem]:
    parallel, experts = role.parallel, shape.experts
    ep, etp = role.key("ep_size"), role.key("etp_size")
    if experts is None:
        if parallel.ep_size > 1 or parallel.etp_size is not None:
            given = f"{dotted(ep)}={parallel.ep_size}" if parallel.ep_size > 1 else f"{dotted(etp)}={parallel.etp_size}"
            yield Problem(
                "MRL-1109",
                f"{given}: {role.words} ({shape.architecture}) has 0 experts to share out.",
                (ep if parallel.ep_size > 1 else etp, role.model),
                ("Set ep_size: 1 and etp_size: null. Ranks that are left over become data-parallel replicas.",),
            )
        return
    yield from _expert_groups(role, num_ranks, unit)
    yield from _expert_parts(role, experts, num_ranks)


def _expert_groups(role: Role, num_ranks: int, unit: int) -> Iterator[Problem]:
    parallel = role.parallel
    per_group = parallel.pp_size * parallel.ep_size * parallel.expert_tp_size
    if num_ranks % per_group == 0:
        return
    names = ("pp_size", "ep_size", "etp_size")
    sizes = (parallel.pp_size, parallel.ep_size, parallel.expert_tp_size)
    product = " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
    yield Problem(
        "MRL-1107",
        f"run.num_ranks={num_ranks} is not a whole number of expert groups: "
        f"{product} = {per_group} ranks per group, {num_ranks} / {per_group} = {num_ranks / per_group:.4g}.",
        (role.key("ep_size"), role.key("etp_size"), role.key("pp_size"), _NUM_RANKS),
        (
            f"Nearest run.num_ranks: {_multiples_near(num_ranks, unit)}. "
            f"Or choose {' x '.join(names)} from: {join(divisors(num_ranks))}.",
        ),
    )


def _expert_parts(role: Role, experts: ExpertShape, num_ranks: int) -> Iterator[Problem]:
    parallel, pp_size = role.parallel, role.parallel.pp_size
    ep_size, etp_size = parallel.ep_size, parallel.expert_tp_size
    if experts.num_experts % ep_size:
        valid = _valid_sizes(experts.num_experts, num_ranks, pp_size * etp_size)
        yield Problem(
            "MRL-1108",
            f"{dotted(role.key('ep_size'))}={ep_size} cannot split {role.words}: "
            f"{experts.num_experts} experts / {ep_size} is not whole.",
            (role.key("ep_size"), role.model),
            (f"Valid here: {join(valid)}.",),
        )
    if ep_size == 1 and etp_size != parallel.tp_size:
        yield Problem(
            "MRL-1108",
            f"{dotted(role.path)}.etp_size={etp_size} is not tp_size {parallel.tp_size}, but ep_size is 1: "
            "Megatron-Core would sum the experts' gradients over the wrong ranks.",
            (role.key("etp_size"), role.key("ep_size"), role.key("tp_size")),
            ("Set etp_size: null, or ep_size to 2 or more.",),
        )
    elif experts.intermediate_size % etp_size:
        given = f"etp_size={etp_size}" if parallel.etp_size is not None else f"etp_size=null (tp_size {etp_size})"
        valid = _valid_sizes(experts.intermediate_size, num_ranks, pp_size * ep_size)
        valid = valid if ep_size > 1 else [size for size in valid if size == parallel.tp_size] or [1]
        yield Problem(
            "MRL-1108",
            f"{dotted(role.path)}.{given} cannot split {role.words}: "
            f"{experts.intermediate_size} columns of an expert / {etp_size} is not whole.",
            (role.key("etp_size"), role.key("tp_size"), role.model),
            (f"Valid here for etp_size: {join(valid)}.",),
        )


def _sequence(role: Role, shape: ModelShape) -> Iterator[Problem]:
    parallel, path = role.parallel, role.key("sequence_parallel")
    if parallel.sequence_parallel and parallel.tp_size == 1:
        yield Problem(
            "MRL-1114",
            f"{dotted(path)}=true has nobody to share with: tp_size is 1.",
            (path, role.key("tp_size")),
            ("Set sequence_parallel: false, or tp_size to 2 or more.",),
        )
    if shape.experts is not None and parallel.tp_size > 1 and not parallel.sequence_parallel:
        yield Problem(
            "MRL-1114",
            f"{dotted(path)}=false with tp_size {parallel.tp_size}: all {parallel.tp_size} ranks would send the same "
            "tokens to the experts.",
            (path, role.key("tp_size"), role.model),
            ("Set sequence_parallel: true, or tp_size: 1.",),
        )


def _multiples_near(number: int, unit: int) -> str:
    above = -(-number // unit) * unit
    return f"{above - unit} or {above}" if above > unit else f"{above}"


def _valid_sizes(whole: int, num_ranks: int, other_size: int) -> list[int]:
    """Sizes that divide ``whole`` and the ranks; if the ranks do not fit anyway, those that divide ``whole``."""
    sizes = [size for size in divisors(whole) if size <= num_ranks]
    return [size for size in sizes if num_ranks % (size * other_size) == 0] or sizes


def join(sizes: list[int]) -> str:
    """The first sizes of a list as text."""
    return ", ".join(str(size) for size in sizes[:_SHOWN]) + (", ..." if len(sizes) > _SHOWN else "")
