"""Thousands of layouts of four shapes against plain counting: a refusal has a reason, and a way out that works."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import yaml

from megarl.config.model_shape import ModelShape, shape_from_hf
from megarl.config.parallel import ParallelSettings
from megarl.config.problems import Problem
from megarl.config.splits import Role, check_splits

ROOT = Path(__file__).parents[2]
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SPARSE = {"num_experts": 6, "moe_intermediate_size": 96, "num_experts_per_tok": 2}
SHAPES = [
    DENSE,
    {**DENSE, "num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 100},
    {**DENSE, **SPARSE, "architectures": ["Qwen3MoeForCausalLM"]},
    {
        **DENSE,
        **SPARSE,
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_hidden_layers": 5,
        "mlp_only_layers": [0],
        "shared_expert_intermediate_size": 36,
    },
]
SIZES = {
    "num_ranks": (4, 6, 8, 24),
    "tp_size": (1, 2, 3, 4),
    "sequence_parallel": (False, True),
    "pp_size": (1, 2, 3),
    "vpp_size": (1, 2),
    "cp_size": (1, 2),
    "ep_size": (1, 2, 4),
    "etp_size": (None, 1, 5),
}
STAGES = (None, (2, 2), (3, 1), (1, 4, 1), (2, 1, 2), (1, 1, 2, 1))


def deals_out(whole: int, parts: int) -> bool:
    """Whether ``whole`` things can be dealt to ``parts`` with none left over."""
    return len(range(0, whole, parts)) * parts == whole


def expected(num_ranks: int, cut: ParallelSettings, shape: ModelShape) -> set[str]:
    """The rules, stated once more and in another way."""
    codes, experts, etp = set(), shape.experts, cut.etp_size or cut.tp_size
    dense = [shape.num_heads, shape.num_kv_heads]
    dense += [shape.intermediate_size] if any(not shape.is_sparse(layer) for layer in range(shape.num_layers)) else []
    dense += [experts.shared_intermediate_size] if experts and experts.shared_intermediate_size else []
    if not deals_out(num_ranks, cut.tp_size * cut.pp_size * cut.cp_size):
        codes.add("MRL-1101")
    if not all(deals_out(size, cut.tp_size) for size in dense):
        codes.add("MRL-1102")
    stages = cut.pp_size * cut.vpp_size
    if cut.vpp_size > 1 and cut.pp_size == 1:
        codes.add("MRL-1112")
    elif cut.stage_layers is None and not deals_out(shape.num_layers, stages):
        codes.add("MRL-1103")
    elif cut.stage_layers is not None and (len(cut.stage_layers), sum(cut.stage_layers)) != (stages, shape.num_layers):
        codes.add("MRL-1115")
    if experts is None:
        codes |= {"MRL-1109"} if cut.ep_size > 1 or cut.etp_size else set()
    else:
        codes |= set() if deals_out(num_ranks, cut.pp_size * cut.ep_size * etp) else {"MRL-1107"}
        fits = deals_out(experts.num_experts, cut.ep_size) and deals_out(experts.intermediate_size, etp)
        shared = cut.ep_size > 1 or etp == cut.tp_size
        codes |= set() if fits and shared else {"MRL-1108"}
    if cut.sequence_parallel != (cut.tp_size > 1) and (cut.sequence_parallel or experts):
        codes.add("MRL-1114")
    return codes


def ask(num_ranks: int, cut: ParallelSettings, shape: ModelShape) -> list[Problem]:
    return check_splits([Role("actor", cut, ("actor", "parallel"), shape, ("model",))], num_ranks)


def way_out(problems: list[Problem], cut: ParallelSettings) -> ParallelSettings:
    """What the first refusal says to write, merged over what was asked for, as the reader of a file would."""
    hint = problems[0].hints[-1]
    found = re.fullmatch(r"Nearest layout that fits \d+ ranks: actor\.parallel: (\{.*\})", hint)
    assert found, hint
    return ParallelSettings.model_validate({**cut.model_dump(), **yaml.safe_load(found[1])})


def check_one(num_ranks: int, cut: ParallelSettings, shape: ModelShape) -> set[str]:
    problems = ask(num_ranks, cut, shape)
    codes = {problem.code for problem in problems}
    assert codes == expected(num_ranks, cut, shape), (num_ranks, cut, shape)
    for problem in problems:
        assert re.search(r"\d", problem.text), problem  # the arithmetic
        assert problem.hints, problem
    if problems:
        instead = way_out(problems, cut)
        assert instead != cut
        assert ask(num_ranks, instead, shape) == [], (num_ranks, cut, instead)
    return codes


def walk() -> Counter[str]:
    """All layouts; the counts of codes, with "valid" for those without."""
    counts: Counter[str] = Counter()
    shapes = [shape_from_hf(one, "a test") for one in SHAPES]
    grid = list(itertools.product(*SIZES.values()))
    assert len(grid) * len(shapes) > 5000
    for number, (num_ranks, *sizes) in enumerate(grid):
        cut = ParallelSettings(
            **dict(zip(list(SIZES)[1:], sizes, strict=True)),
            # uneven stages take turns with equal ones, so that the grid does not become six times as large
            stage_layers=STAGES[number % len(STAGES)] if number % 3 == 0 else None,
        )
        for shape in shapes[number % 2 :: 2]:
            codes = check_one(num_ranks, cut, shape)
            counts.update(codes or {"valid"})
    return counts


def test_the_grid_agrees_with_plain_counting_and_every_way_out_works_without_torch() -> None:
    code = (
        "import sys\n"
        "from tests.unit.test_config_grid import walk\n"
        "counts = walk()\n"
        "assert not {'torch', 'transformers', 'megatron'} & set(sys.modules)\n"
        "print(*(f'{code}={count}' for code, count in counts.items()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = dict(pair.split("=") for pair in done.stdout.split())
    rules = {f"MRL-{number}" for number in (1101, 1102, 1103, 1107, 1108, 1109, 1112, 1114, 1115)}
    assert set(counts) == rules | {"valid"}  # the grid has all kinds
    assert min(map(int, counts.values())) >= 20
