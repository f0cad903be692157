"""Log-probs straight from hidden states, on one rank (a split vocabulary: tests/distributed/test_logprobs.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from megarl.ops.logprobs import align_to_tokens, hidden_logprobs, next_tokens

VOCAB_SIZE, PADDED_SIZE, HIDDEN_SIZE = 61, 64, 12

Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    alone = dist.group.WORLD
    assert alone is not None
    yield alone
    dist.destroy_process_group()


def chunked(
    group: dist.ProcessGroup, chunk_tokens: int, temperature: float = 1.0, num_columns: int = VOCAB_SIZE
) -> Head:
    return partial(
        hidden_logprobs,
        group=group,
        first_column=0,
        num_columns=num_columns,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
    )


def naive(temperature: float = 1.0, num_columns: int = VOCAB_SIZE) -> Head:
    def compute(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = torch.log_softmax(hidden @ weight[:num_columns].T / temperature, dim=1)
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)

    return compute


def inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED_SIZE, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def results(head: Head, num_tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """[log-probs, entropies, gradient of the hidden states, gradient of the output layer]."""
    hidden, weight, targets = inputs(num_tokens, dtype)
    logprobs, entropy = head(hidden, weight, targets)
    ramp = torch.linspace(-1, 2, num_tokens, dtype=torch.float64)
    (ramp * logprobs + (0.5 - ramp) * entropy).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return [logprobs.detach(), entropy.detach(), hidden.grad, weight.grad]


@given(st.integers(1, 20), st.integers(0, 25), st.sampled_from([0.5, 1.0, 1.7]))
@settings(deadline=None)
def test_chunks_do_not_change_the_maths(
    group: dist.ProcessGroup, num_tokens: int, chunk_tokens: int, temperature: float
) -> None:
    found = results(chunked(group, chunk_tokens, temperature), num_tokens)
    expected = results(naive(temperature), num_tokens)
    for ours, theirs in zip(found, expected, strict=True):
        # float64 on both sides: only the order of sums over 61 columns differs
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert not found[3][VOCAB_SIZE:].any(), "padding must not learn"


@pytest.mark.parametrize("chunk_tokens", [0, 2])
def test_gradients_against_finite_differences(group: dist.ProcessGroup, chunk_tokens: int) -> None:
    hidden, weight, targets = inputs(5)
    head = chunked(group, chunk_tokens, temperature=0.8)
    assert torch.autograd.gradcheck(lambda h, w: head(h, w, targets), (hidden, weight))


@pytest.mark.parametrize("chunk_tokens", [0, 3])
def test_either_output_and_either_input_may_stand_alone(group: dist.ProcessGroup, chunk_tokens: int) -> None:
    """A loss of log-probs only, or of entropies only, with only one of the inputs learning."""
    for output in (0, 1):
        for frozen in (0, 1):
            gradients = []
            for head in (chunked(group, chunk_tokens), naive()):
                operands = inputs(7)
                operands[frozen].requires_grad_(False)
                head(*operands)[output].sum().backward()
                assert operands[frozen].grad is None
                gradients.append(operands[1 - frozen].grad)
            torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)  # float64, see above


def test_the_weight_gradient_of_bfloat16_is_summed_in_float32(group: dist.ProcessGroup) -> None:
    """1024 equal tokens in chunks of one: a bfloat16 sum of equal terms stops growing at the 256th."""

    def weight_gradient(chunk_tokens: int) -> torch.Tensor:
        hidden, weight, _ = inputs(1, torch.bfloat16)
        targets = torch.zeros(1024, dtype=torch.int64)
        chunked(group, chunk_tokens)(hidden.detach().expand(1024, -1), weight, targets)[0].sum().backward()
        assert weight.grad is not None
        assert weight.grad.dtype == torch.bfloat16
        return weight.grad

    # the logits' gradient is rounded to 8 bits, each product once more, and their sum at the end
    torch.testing.assert_close(weight_gradient(1), weight_gradient(0), rtol=3 * 2**-8, atol=0)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that the CPU allocator had handed out during ``run`` above what it had before: every allocation and
    every release that torch makes, inside operators too.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest


def test_memory_is_bounded_by_the_chunk(group: dist.ProcessGroup) -> None:
    num_tokens, vocab_size, hidden_size, chunk_tokens = 512, 4000, 8, 16
    hidden = torch.randn(num_tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocab_size, hidden_size, requires_grad=True)
    targets = torch.randint(0, vocab_size, (num_tokens,))

    def step(head: Head) -> None:
        logprobs, entropy = head(hidden, weight, targets)
        torch.autograd.grad((logprobs + 0.1 * entropy).sum(), (hidden, weight))

    logits_bytes = 4 * vocab_size * num_tokens
    chunk_bytes = 4 * vocab_size * chunk_tokens
    gradients = 4 * hidden_size * (vocab_size + num_tokens)
    columns = 30 * 8 * num_tokens  # [T] statistics, targets and their places
    found = peak_bytes(lambda: step(chunked(group, chunk_tokens, num_columns=vocab_size)))
    # Two buffers of a chunk: logits and probabilities.
    assert 2 * chunk_bytes <= found <= 2 * chunk_bytes + gradients + columns
    assert peak_bytes(lambda: step(naive(num_columns=vocab_size))) >= 2 * logits_bytes


def test_alignment() -> None:
    token_ids = torch.tensor([7, 8, 9])
    assert next_tokens(token_ids).tolist() == [8, 9, 7]
    assert align_to_tokens(next_tokens(token_ids)).tolist() == token_ids.tolist()
