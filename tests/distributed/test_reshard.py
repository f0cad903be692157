"""A checkpoint of one layout goes on in another: every saved element exact, the next steps' losses within float noise.
In its own layout it goes on with the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.test_parity import PPO, TOLERANCES
from tests.distributed.tiny_models import tiny_model
from tests.distributed.training_jobs import recorded_groups

SP = {"tp_size": 2, "sequence_parallel": True}
SAVED: dict[str, tuple[str, bool, int, dict[str, Any]]] = {
    "dense tp2 pp2": ("qwen3", True, 4, {"tp_size": 2, "pp_size": 2}),
    "dense pp2 vpp2": ("llama", False, 2, {"pp_size": 2, "vpp_size": 2}),
    "experts ep2 pp2": ("qwen3_moe", False, 4, {"ep_size": 2, "pp_size": 2}),
    "experts tp2 sp": ("qwen3_moe", False, 2, SP),
}
RESUMED: list[tuple[str, str, int, dict[str, Any]]] = [
    ("dense tp2 pp2", "the same", 4, {"tp_size": 2, "pp_size": 2}),
    ("dense tp2 pp2", "dp2", 2, {}),
    ("dense tp2 pp2", "tp1", 1, {}),
    ("dense tp2 pp2", "cp2 pp2", 4, {"cp_size": 2, "pp_size": 2}),
    ("dense pp2 vpp2", "the same", 2, {"pp_size": 2, "vpp_size": 2}),
    ("dense pp2 vpp2", "tp2 sp", 2, SP),
    ("dense pp2 vpp2", "pp2 uneven", 2, {"pp_size": 2, "stage_layers": [3, 1]}),
    ("experts ep2 pp2", "the same", 4, {"ep_size": 2, "pp_size": 2}),
    ("experts ep2 pp2", "tp1", 1, {}),
    ("experts ep2 pp2", "tp2 sp etp1 ep2", 2, {**SP, "etp_size": 1, "ep_size": 2}),
    ("experts tp2 sp", "the same", 2, SP),
    ("experts tp2 sp", "ep2", 2, {"ep_size": 2}),
]


def steps_job(
    world: Any,
    directory: str,
    sizes: dict[str, Any],
    checkpoints: str,
    from_step: int,
    save_as: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[dict[str, float] | None]:
    """Two steps, from the beginning or from a checkpoint. Saves after the first two, or at once under ``save_as``."""
    from megarl.algorithms.choose import build_algorithm
    from megarl.checkpoint.store import CheckpointStore
    from megarl.config.algorithms import PpoSettings
    from megarl.config.parallel import ParallelSettings
    from megarl.data.distribute import distribute
    from megarl.data.pack import pack
    from megarl.metrics.meter import Meter
    from megarl.metrics.reduce import reduce_to_driver
    from megarl.models.build import ModelOptions
    from megarl.models.critic import Critic
    from megarl.models.decoder import LanguageModel, ValueModel
    from megarl.models.hf_weights import random_weights, safetensors_weights
    from megarl.models.optim import OptimizerSettings, TrainingOptions
    from megarl.models.policy import Policy
    from megarl.models.reference import Reference
    from megarl.models.setup import lay_out
    from tests.distributed.builders import shape_in
    from tests.distributed.training_jobs import _plan, _value_source

    shape, layout = shape_in(directory), lay_out(world, ParallelSettings(**sizes))
    settings = PpoSettings(**PPO)
    algorithm = build_algorithm(settings)
    optimizer = OptimizerSettings(lr=1e-3, num_updates=100, eps=1e-5, grad_clip=1.0)
    # what a checkpoint must replace: weights of a resumed run come from elsewhere
    start = safetensors_weights(Path(directory)) if from_step == 0 else random_weights(99, 0.1)
    options = ModelOptions(dtype=dtype)
    policy = Policy(LanguageModel(shape, layout, options, start), optimizer, TrainingOptions(), 0.9)
    values = _value_source(7) if from_step == 0 else random_weights(98, 0.1)
    critic = Critic(ValueModel(shape, layout, options, values), optimizer, TrainingOptions())
    reference = Reference(LanguageModel(shape, layout, options, random_weights(from_step, 0.1)), 0.9)
    models: dict[str, Any] = {"actor": policy, "critic": critic, "reference": reference}
    if from_step == 0:
        reference.copy_from(policy.model)
    else:
        checkpoint = CheckpointStore(Path(checkpoints), world, keep=9).open_newest()
        assert checkpoint is not None and checkpoint.step == from_step
        checkpoint.fill([one for role, model in models.items() for one in model.make_room(checkpoint.progress[role])])
        for model in models.values():
            model.restored()

    def save(where: str, step: int) -> None:
        store = CheckpointStore(Path(where), world, keep=9)
        slices = [one for model in models.values() for one in model.slices()]
        store.save(step, slices, {role: model.state() for role, model in models.items()}, {}, wait=True)

    if save_as is not None:
        save(save_as, from_step)
    groups = recorded_groups(vocab_size=shape.vocab_size) if world.is_driver else []
    algorithm.credit_groups(groups, Meter())
    records = []
    for step in range(from_step + 1, from_step + (5 if from_step == 0 else 3)):
        batch = distribute(pack(groups, _plan(settings, layout, 128)) if world.is_driver else None, world)
        for annotator in (reference, policy, critic):
            batch = annotator.annotate(batch)
        meter = Meter()
        batch = algorithm.credit_tokens(batch, world, meter)
        for learner in (critic, policy):
            meter.merge(learner.update(batch, algorithm))
        records.append(reduce_to_driver(meter, world))
        if from_step == 0 and step == 2:
            save(checkpoints, step)
    return records


@pytest.fixture(scope="module")
def saved(gang: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Four steps without interruption in a layout, with a checkpoint after the second."""
    done: dict[str, Any] = {}

    def get(name: str) -> tuple[Path, Path, list[dict[str, float]]]:
        if name not in done:
            family, tied, size, sizes = SAVED[name]
            model, checkpoints = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("checkpoints")
            tiny_model(family, tied=tied, directory=model)
            records = gang(size).run(
                steps_job, parallel=sizes, directory=str(model), sizes=sizes, checkpoints=str(checkpoints), from_step=0
            )[0]
            done[name] = (model, checkpoints, records)
        return done[name]

    return get


@pytest.mark.parametrize(
    ("name", "size", "sizes"),
    [(name, size, sizes) for name, _, size, sizes in RESUMED],
    ids=[f"{name} to {target}" for name, target, _, _ in RESUMED],
)
def test_a_checkpoint_goes_on_in_another_layout(
    name: str, size: int, sizes: dict[str, Any], gang: Any, saved: Any, tmp_path: Path
) -> None:
    from megarl.checkpoint.store import open_checkpoint

    model, checkpoints, expected = saved(name)
    records = gang(size).run(
        steps_job,
        parallel=sizes,
        directory=str(model),
        sizes=sizes,
        checkpoints=str(checkpoints),
        from_step=2,
        save_as=str(tmp_path),
    )[0]
    before, again = open_checkpoint(checkpoints, None), open_checkpoint(tmp_path, None)
    assert before.names() == again.names()
    kinds = {(name.split("/")[0], name.split("/")[1]) for name in before.names()}
    assert {("actor", "exp_avg"), ("critic", "exp_avg_sq"), ("actor", "weight"), ("reference", "weight")} <= kinds
    for tensor in before.names():
        assert torch.equal(before.read(tensor), again.read(tensor)), f"{tensor} changed on the way"
    for ours, theirs in zip(records, expected[2:], strict=True):
        assert ours.keys() == theirs.keys()
        if sizes == SAVED[name][3]:
            assert ours == theirs, "the same layout goes on with the same bits"
        for loss in ("actor/pg_loss", "critic/vf_loss"):
            assert abs(ours[loss] - theirs[loss]) <= TOLERANCES["loss"] * max(1, abs(theirs[loss])), loss
    assert np.isfinite(list(records[0].values())).all()


def test_bf16_keeps_its_fp32_main_weights(gang: Any, tmp_path: Path) -> None:
    """Saved by two replicas, resumed by two replicas and by one rank."""
    from megarl.checkpoint.store import open_checkpoint

    tiny_model("llama", directory=tmp_path / "model")
    arguments = {
        "directory": str(tmp_path / "model"),
        "sizes": {},
        "checkpoints": str(tmp_path / "saved"),
        "dtype": torch.bfloat16,
    }
    expected = gang(2).run(steps_job, **arguments, from_step=0)[0]
    before = open_checkpoint(tmp_path / "saved", None)
    weight = before.read("actor/weight/model.layers.0.mlp.down_proj.weight")
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float()), "main weights are finer than the model's"
    for size in (2, 1):
        again = tmp_path / f"again_{size}"
        records = gang(size).run(steps_job, **arguments, from_step=2, save_as=str(again))[0]
        assert all(torch.equal(before.read(name), open_checkpoint(again, None).read(name)) for name in before.names())
        if size == 2:
            assert records == expected[2:]
