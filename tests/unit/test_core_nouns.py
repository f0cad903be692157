"""Samples, batches, and callables by import path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.core import wire
from megarl.core.batch import MicroBatch, MiniBatch, TrainBatch
from megarl.core.errors import ConfigError
from megarl.core.importing import import_callable
from megarl.core.sample import Sample
from tests.unit.one_rank import micro_of


def test_a_sample_counts_the_tokens_of_the_policy() -> None:
    sample = Sample(np.arange(5), np.array([0, 0, 1, 0, 1], dtype=np.int8), np.zeros(5, dtype=np.float32), "stop")
    assert sample.num_response_tokens == 2
    assert sample.reward is None


@pytest.mark.parametrize(("num_mask", "num_logprobs"), [(4, 5), (5, 4), (6, 5)])
def test_a_samples_arrays_have_one_length(num_mask: int, num_logprobs: int) -> None:
    with pytest.raises(ValueError, match=rf"5 tokens, {num_mask} mask, {num_logprobs} log-probs"):
        Sample(np.arange(5), np.ones(num_mask, dtype=np.int8), np.zeros(num_logprobs, dtype=np.float32), "stop")


def test_tokens_know_their_sequence() -> None:
    micro = micro_of([[0, 1, 1], [0], [0, 1]])
    assert (micro.num_tokens, micro.num_sequences) == (6, 3)
    assert micro.sequence_of_token.tolist() == [0, 0, 0, 1, 2, 2]


def test_a_batch_survives_the_wire() -> None:
    first = micro_of([[0, 1, 1], [0]], old_logprobs=torch.randn(4), advantages=torch.tensor([0, 1.5, -2, float("nan")]))
    second = micro_of([[0, 1]])
    batch = TrainBatch([MiniBatch([first, second], 3, 2), MiniBatch([second], 1, 1)])
    copy = TrainBatch.from_tree(wire.decode(wire.encode(batch.to_tree())), torch.device("cpu"))
    assert [(len(mini.microbatches), mini.num_loss_tokens, mini.num_sequences) for mini in copy.minibatches] == [
        (2, 3, 2),
        (1, 1, 1),
    ]
    for ours, theirs in zip(copy.microbatches(), batch.microbatches(), strict=True):
        for name in MicroBatch.__dataclass_fields__:
            sent, arrived = getattr(theirs, name), getattr(ours, name)
            if sent is None:
                assert arrived is None, name
            else:
                assert arrived.dtype == sent.dtype, name
                assert torch.equal(arrived.view(torch.uint8), sent.view(torch.uint8)), name  # bits: NaN equals itself


def test_import_callable_finds_functions_and_classes() -> None:
    assert import_callable("json:dumps", "x")([1]) == "[1]"
    assert import_callable("pathlib:Path", "x") is Path


@pytest.mark.parametrize(
    ("path", "code", "told"),
    [
        ("json", "MRL-1301", '"package.module:name"'),
        (":dumps", "MRL-1301", '"package.module:name"'),
        ("json:", "MRL-1301", '"package.module:name"'),
        ("no_such_package.x:f", "MRL-1302", "no_such_package"),
        (".json:dumps", "MRL-1302", "TypeError"),
        ("broken_rewards:f", "MRL-1302", "ZeroDivisionError: division by zero"),
        ("json:dunps", "MRL-1303", "dumps"),
        ("json:__name__", "MRL-1303", "dumps"),
        ("json:dumps:more", "MRL-1303", "dumps"),
    ],
)
def test_import_callable_explains_itself(
    path: str, code: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        import_callable(path, "rewards.name")
    message = str(caught.value)
    assert caught.value.code == code
    assert message.startswith(f"{code} rewards.name")
    assert told in message
