"""What is passed through to Megatron-Core, and what of ours it would refuse: against the installed package."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config import megatron_fields
from megarl.config.megatron_fields import installed_fields, split_megatron
from megarl.config.model_shape import ModelShape, shape_from_hf
from megarl.config.parallel import ParallelSettings
from tests.unit.config_files import MINIMAL, load_text, refusal
from tests.unit.test_config_grid import SHAPES, SIZES, ask

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("option", "code", "words"),
    [
        (
            "actor.megatron.moe_expert_capacity_facto=1.0",
            "MRL-1001",
            "Did you mean actor.megatron.moe_expert_capacity_factor?",
        ),
        ("actor.megatron.nonsense=1", "MRL-1001", "is not an option of the installed Megatron-Core."),
        ("actor.megatron._cpu_offloading_context=null", "MRL-1001", "is not an option"),
        ("reference.megatron.bucket_size=1000", "MRL-1001", "the fields of its TransformerConfig."),
        ("actor.megatron.num_layers=3", "MRL-1012", "Use model instead."),
        ("actor.megatron.tensor_model_parallel_size=2", "MRL-1012", "Use actor.parallel.tp_size instead."),
        ("critic.megatron.lr=0.1", "MRL-1012", "Use critic.optimizer.lr instead."),
        ("actor.megatron.bf16=true", "MRL-1012", "Use model.dtype instead."),
        ("actor.megatron.hidden_dropout=0.1", "MRL-1012", "it is fixed"),
        ("actor.megatron.bucket_size=many", "MRL-1003", 'bucket_size="many" is not allowed. It must be Optional[int].'),
        ("actor.megatron.bucket_size=true", "MRL-1003", "It must be Optional[int]."),
        ("actor.megatron.moe_router_dtype=fp16", "MRL-1003", "It must be Optional[Literal['fp32', 'fp64']]."),
        ("actor.megatron.recompute_modules=moe", "MRL-1003", "It must be Optional[List[str]]."),
        ("actor.megatron.init_method=1", "MRL-1003", "YAML cannot express such a value"),
    ],
)
def test_options_are_checked(tmp_path: Path, option: str, code: str, words: str) -> None:
    message = refusal(tmp_path, MINIMAL, option)
    assert message.startswith(f"{code} command line {option.partition('=')[0]}")
    assert words in message


def test_options_go_where_their_field_is(tmp_path: Path) -> None:
    given = "{moe_expert_capacity_factor: 1, pin_cpu_grads: true, bucket_size: null, fp8_recipe: delayed, "
    given += "recompute_modules: [mlp]}"
    config = load_text(tmp_path, MINIMAL, f"actor.megatron={given}")
    transformer, optimizer, ddp = split_megatron(config.actor.megatron)
    assert transformer == {"moe_expert_capacity_factor": 1, "fp8_recipe": "delayed", "recompute_modules": ["mlp"]}
    assert optimizer == {"pin_cpu_grads": True, "fp8_recipe": "delayed"}  # a field of both
    assert ddp == {"bucket_size": None}


def test_every_option_that_megarl_sets_exists() -> None:
    installed = installed_fields()
    assert installed is not None
    known = {name for fields in installed.values() for name in fields}
    assert set(megatron_fields._DECIDED_BY) <= known


def test_without_megatron_only_our_own_options_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_fields, "installed_fields", lambda: None)
    assert load_text(tmp_path, MINIMAL, "actor.megatron.anything=1").actor.megatron == {"anything": 1}
    assert "MRL-1012" in refusal(tmp_path, MINIMAL, "actor.megatron.num_layers=3")


IN_MEGATRON = """
import dataclasses, json, sys
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build

def builds(case):
    cut, shape = case["cut"], case["shape"]
    sizes = dict(
        tensor_model_parallel_size=cut["tp_size"], pipeline_model_parallel_size=cut["pp_size"],
        context_parallel_size=cut["cp_size"], expert_model_parallel_size=cut["ep_size"],
        expert_tensor_parallel_size=cut["etp_size"],
        virtual_pipeline_model_parallel_size=cut["vpp_size"] if cut["vpp_size"] > 1 else None,
    )
    layout = None
    if cut["stage_layers"]:
        layout = [["decoder"] * count for count in cut["stage_layers"]]
        layout[0].insert(0, "embedding")
        layout[-1].append("loss")
    torch.distributed.init_process_group("fake", rank=0, world_size=case["num_ranks"], store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
        if cut["stage_layers"]:
            sizes["virtual_pipeline_model_parallel_size"] = None
        config = TransformerConfig(
            num_layers=shape["num_layers"], hidden_size=shape["hidden_size"], num_attention_heads=shape["num_heads"],
            num_query_groups=shape["num_kv_heads"], kv_channels=shape["head_dim"], add_bias_linear=False,
            ffn_hidden_size=shape["intermediate_size"], num_moe_experts=shape["num_experts"],
            moe_ffn_hidden_size=shape["expert_size"], sequence_parallel=cut["sequence_parallel"],
            pipeline_dtype=torch.float32, pipeline_model_parallel_layout=layout, **sizes,
        )
        if layout:
            return (config.virtual_pipeline_model_parallel_size or 1) == cut["vpp_size"]
        stages = [(chunk, rank) for chunk in range(cut["vpp_size"]) for rank in range(cut["pp_size"])]
        layers = [get_num_layers_to_build(config, chunk, rank) for chunk, rank in stages]
        assert sum(layers) == shape["num_layers"] and min(layers) > 0
        return True
    except (ValueError, RuntimeError, AssertionError, IndexError):
        return False
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()

cases = json.load(sys.stdin)
fields = {cls.__name__: [field.name for field in dataclasses.fields(cls)]
          for cls in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)}
print(json.dumps({"fields": fields, "builds": [builds(case) for case in cases]}))
"""


@pytest.mark.slow
def test_layouts_and_fields_agree_with_megatron_itself() -> None:
    """On a sample of the grid: what we accept Megatron accepts, what we refuse for one of its own reasons it refuses.

    The groups are made with torch's fake backend, which needs no other ranks.
    """
    drawn = draw(40)
    cases = [{"num_ranks": ranks, "cut": cut.model_dump(), "shape": plain(shape)} for ranks, cut, shape in drawn]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_MEGATRON],
        input=json.dumps(cases),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    installed = installed_fields()
    assert installed is not None
    assert {owner: set(fields) for owner, fields in installed.items()} == {
        owner: set(fields) for owner, fields in answer["fields"].items()
    }
    for (num_ranks, cut, shape), accepted in zip(drawn, answer["builds"], strict=True):
        codes = {problem.code for problem in ask(num_ranks, cut, shape)}
        if not codes:
            assert accepted, (num_ranks, cut, shape)
        elif codes - STRICTER:
            assert not accepted, (num_ranks, cut, shape, codes)


# Rules that Megatron only applies when it builds the layers or runs them: columns and experts that do not divide, and
# experts under tensor parallelism without sequence parallelism. Sizes for experts that do not exist it may ignore.
STRICTER = {"MRL-1102", "MRL-1108", "MRL-1109", "MRL-1114"}


def draw(each: int) -> list[tuple[int, ParallelSettings, ModelShape]]:
    """That many layouts of the grid that we accept, and as many that we refuse."""
    grid = itertools.product(SHAPES, (None, (3, 1), (1, 4, 1)), *SIZES.values())
    shuffled = random.Random(0).sample(list(grid), 5000)
    drawn: dict[bool, list[tuple[int, ParallelSettings, ModelShape]]] = {True: [], False: []}
    for config, stage_layers, num_ranks, *sizes in shuffled:
        cut = ParallelSettings(**dict(zip(list(SIZES)[1:], sizes, strict=True)), stage_layers=stage_layers)
        case = (num_ranks, cut, shape_from_hf(config, "a test"))
        same = drawn[not ask(*case)]
        if len(same) < each:
            same.append(case)
        if len(drawn[True]) == len(drawn[False]) == each:
            break
    assert len(drawn[True]) == each
    return drawn[True] + drawn[False]


def plain(shape: ModelShape) -> dict[str, Any]:
    experts = shape.experts
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    return {
        **{name: getattr(shape, name) for name in names},
        "num_experts": experts.num_experts if experts else None,
        "expert_size": experts.intermediate_size if experts else None,
    }
