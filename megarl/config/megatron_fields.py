"""The options that `actor.megatron` and its like pass through, checked against the installed Megatron-Core.

Its classes are read, not imported: importing them takes torch and eight seconds.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megarl.config import catalogue
from megarl.config.annotations import accepts
from megarl.config.problems import KeyPath, Problem, dotted, show
from megarl.config.schema import RunConfig

_TRANSFORMER, _OPTIMIZER, _DDP = "TransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig"
# class -> the files that define its fields: its own, and those of what it inherits from
_FILES: dict[str, tuple[tuple[str, str], ...]] = {
    _TRANSFORMER: (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", _TRANSFORMER),
    ),
    _OPTIMIZER: (("optimizer/optimizer_config.py", _OPTIMIZER),),
    _DDP: (("distributed/distributed_data_parallel_config.py", _DDP),),
}

_OF_THE_MODEL = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels layernorm_epsilon "
    "normalization gated_linear_unit activation_func add_bias_linear add_qkv_bias qk_layernorm softmax_scale "
    "num_moe_experts moe_router_topk moe_ffn_hidden_size moe_layer_freq moe_shared_expert_intermediate_size "
    "moe_shared_expert_gate moe_router_pre_softmax moe_router_score_function multi_latent_attention window_size "
    "init_method_std"
)
_FIXED = (
    "hidden_dropout attention_dropout calculate_per_token_loss variable_seq_lengths perform_initialization "
    "use_cpu_initialization use_distributed_optimizer grad_reduce_in_fp32 fp16 decoupled_lr decoupled_min_lr "
    "moe_aux_loss_coeff moe_z_loss_coeff moe_router_load_balancing_type moe_input_jitter_eps "
    "test_mode mtp_num_layers num_distributed_optimizer_instances use_megatron_fsdp use_custom_fsdp"
)
# option -> the setting of the same section (or, with a dot in front, of the whole file) that decides it
_DECIDED_BY: dict[str, str] = {
    "tensor_model_parallel_size": "parallel.tp_size",
    "sequence_parallel": "parallel.sequence_parallel",
    "pipeline_model_parallel_size": "parallel.pp_size",
    "virtual_pipeline_model_parallel_size": "parallel.vpp_size",
    "pipeline_model_parallel_layout": "parallel.stage_layers",
    "num_layers_in_first_pipeline_stage": "parallel.stage_layers",
    "num_layers_in_last_pipeline_stage": "parallel.stage_layers",
    "account_for_embedding_in_pipeline_split": "parallel.stage_layers",
    "account_for_loss_in_pipeline_split": "parallel.stage_layers",
    "context_parallel_size": "parallel.cp_size",
    "expert_model_parallel_size": "parallel.ep_size",
    "expert_tensor_parallel_size": "parallel.etp_size",
    "recompute_granularity": "recompute",
    "moe_layer_recompute": "recompute",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
    "optimizer": "optimizer",
    "lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr_ratio",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_eps": "optimizer.eps",
    "clip_grad": "optimizer.grad_clip",
    "optimizer_cpu_offload": "optimizer.cpu_offload",
    "bf16": ".model.dtype",
    "params_dtype": ".model.dtype",
    "pipeline_dtype": ".model.dtype",
    "deterministic_mode": ".run.deterministic",
    **dict.fromkeys(_OF_THE_MODEL.split(), ".model"),
    **dict.fromkeys(_FIXED.split(), ""),
}


def split_megatron(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The options of TransformerConfig, of OptimizerConfig and of DistributedDataParallelConfig.

    An option that several of them have goes to each.
    """
    known = installed_fields() or {}
    transformer, optimizer, ddp = (
        {key: value for key, value in options.items() if key in known.get(owner, {})} for owner in _FILES
    )
    return transformer, optimizer, ddp


@cache
def installed_fields() -> dict[str, dict[str, ast.expr]] | None:
    """Class -> field -> annotation, of the installed Megatron-Core; None if there is none, or not one like this."""
    spec = importlib.util.find_spec("megatron")  # a namespace package: nothing of it is executed
    for location in (spec.submodule_search_locations or ()) if spec else ():
        root = Path(location) / "core"
        try:
            return {
                owner: {name: kind for file, cls in files for name, kind in _fields(root / file, cls)}
                for owner, files in _FILES.items()
            }
        except (OSError, SyntaxError):
            continue
    return None


def check_megatron(config: RunConfig) -> Iterator[Problem]:
    """Options that Megatron-Core does not have, that megarl sets itself, or whose value has the wrong type."""
    everything = (_TRANSFORMER, _OPTIMIZER, _DDP)
    sections = (
        ("actor", config.actor.megatron, everything),
        ("critic", config.critic.megatron, everything),
        ("reference", config.reference.megatron, (_TRANSFORMER,)),  # it is not trained
        ("reward_model", config.reward_model.megatron, (_TRANSFORMER,)),  # nor is this one
    )
    for section, options, owners in sections:
        if options:
            yield from _check_options(section, options, owners)


def _check_options(section: str, options: Mapping[str, Any], owners: tuple[str, ...]) -> Iterator[Problem]:
    installed = installed_fields()
    known = {name: kind for owner in owners for name, kind in installed[owner].items()} if installed else {}
    for option, value in options.items():
        path: KeyPath = (section, "megatron", option)
        if option in _DECIDED_BY:
            yield Problem("MRL-1012", f"{dotted(path)} is not yours to set.", (path,), (_instead(section, option),))
        elif not installed:
            continue
        elif option not in known or option.startswith("_"):
            close = catalogue.closest(option, [name for name in known if name not in _DECIDED_BY])
            meant = f" Did you mean {dotted((*path[:-1], close))}?" if close else ""
            yield Problem(
                "MRL-1001",
                f"{dotted(path)} is not an option of the installed Megatron-Core.{meant}",
                (path,),
                (f"Options are the fields of its {' and '.join(owners)}.",),
            )
        elif not accepts(known[option], value, foreign=False):
            kind = ast.unparse(known[option])
            yield Problem(
                "MRL-1003",
                f"{dotted(path)}={show(value)} is not allowed. It must be {kind}.",
                (path,),
                () if _is_writable(known[option]) else ("YAML cannot express such a value; leave the option out.",),
            )


def _instead(section: str, option: str) -> str:
    setting = _DECIDED_BY[option]
    if not setting:
        return "megarl's arithmetic depends on it, so it is fixed. Remove the line."
    return f"Use {setting.removeprefix('.') if setting.startswith('.') else f'{section}.{setting}'} instead."


def _fields(file: Path, cls: str) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == cls:
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield statement.target.id, statement.annotation


def _is_writable(annotation: ast.expr) -> bool:
    """Whether YAML has any value but null that fits."""
    samples: tuple[Any, ...] = (1, 1.0, True, "", [])
    literals = [
        node.value for node in ast.walk(annotation) if isinstance(node, ast.Constant) and node.value is not None
    ]
    return any(accepts(annotation, sample, foreign=False) for sample in (*samples, *literals))
