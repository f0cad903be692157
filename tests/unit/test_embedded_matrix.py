"""A packed matrix against the plain one."""

from __future__ import annotations

import pytest
import torch

from megarl.generation.embedded.matrix import Matrix

SIZES = [(1024, 512), (512, 1536), (192, 48), (40, 24), (100, 7), (64, 3000)]


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(size[-1]))


@pytest.mark.parametrize("size", SIZES)
def test_products_are_those_of_the_plain_matrix(size: tuple[int, int]) -> None:
    plain, rows, bias, residual = random(*size), random(9, size[1]), random(size[0]), random(9, size[0])
    expected = rows.double() @ plain.double().t()
    matrix = Matrix(plain.clone())
    matrix.seal()
    # fp32 sums of up to 3,000 products of numbers around 1
    torch.testing.assert_close(matrix.times(rows).double(), expected, rtol=1e-5, atol=2e-4)
    assert torch.equal(matrix.times(rows, bias), matrix.times(rows) + bias)
    assert torch.equal(matrix.added_to(residual, rows), residual + matrix.times(rows))


@pytest.mark.parametrize("size", SIZES)
def test_a_row_does_not_feel_how_many_there_are(size: tuple[int, int]) -> None:
    matrix = Matrix(random(*size))
    matrix.seal()
    rows = random(200, size[1])
    together = matrix.times(rows)
    for count in (2, 3, 4, 5, 8, 13, 31, 32, 64, 127):
        assert torch.equal(matrix.times(rows[count : 2 * count]), together[count : 2 * count][: 200 - count]), count


@pytest.mark.parametrize("is_shared", [True, False])
def test_it_is_held_once_and_read_back_with_the_same_bits(is_shared: bool) -> None:
    plain = random(96, 40)
    expected, num_bytes = plain.clone(), plain.nbytes
    matrix = Matrix(plain, is_shared)
    for _ in range(2):
        matrix.open()
        plain.copy_(expected)
        matrix.seal()
        assert matrix.num_bytes == num_bytes
        assert torch.equal(matrix.values(), expected)
    matrix.release()
    assert matrix.num_bytes == 0
    if is_shared:
        assert torch.equal(plain, expected)
