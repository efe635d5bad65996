"""Forwards on the meta device: what they are told of devices and values, and when they are refused."""

import numpy as np
import pytest
import torch

from lowtide.errors import ConfigError
from lowtide.measure.shapes import MOST_FLOATS, MOST_WHOLE_NUMBERS, Shapes

LENGTHS = [5, 2]


def _run(function, *inputs):
    shapes = Shapes()
    taken = shapes.take(inputs)
    with shapes:
        return function(*taken)


def _hidden(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(2, 5, 8, dtype=dtype, device="meta")


def _mask() -> torch.Tensor:
    return torch.arange(5)[None] < torch.tensor(LENGTHS)[:, None]


def _written(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    lengths = torch.zeros(2, dtype=torch.int64, device=hidden.device)
    lengths[0] = 3
    lengths[1:].add_(mask.sum())
    return hidden.new_zeros(lengths.tolist())


def _padded(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    padded = hidden.new_zeros(2, int(mask.sum(1).max()), 8)
    for row, length in enumerate(mask.sum(1).tolist()):
        padded[row, :length] = hidden[row, :length]
    return padded


READERS = {
    "a mask as an index": lambda hidden, mask: hidden[mask],
    "a mask beside a slice": lambda hidden, mask: hidden[:, mask[1]],
    "a mask among what is written": lambda hidden, mask: hidden.clone().index_put_((mask,), hidden[mask]),
    "positions": lambda hidden, mask: hidden.flatten(0, 1)[mask.flatten().nonzero().squeeze(1)],
    "masked_select": lambda hidden, mask: hidden.masked_select(mask[..., None]),
    "a number": lambda hidden, mask: hidden[:, : mask.sum(1).min().item()],
    "a tensor as a bound": lambda hidden, mask: hidden[:, : mask[1].sum()],
    "a list": lambda hidden, mask: hidden[0].split([*mask.sum(0).unique().tolist(), 2])[0],
    "an array": lambda hidden, mask: hidden[:, : int(np.asarray(mask.sum(1).cpu()).min())],
    "a question": lambda hidden, mask: hidden if mask.all() else hidden.repeat(2, 1, 1),
    "a comparison": lambda hidden, mask: hidden if torch.equal(mask, ~mask) else hidden[0],
    "repeats": lambda hidden, mask: hidden.repeat_interleave(mask.sum(1), dim=0),
    "distinct values": lambda hidden, mask: hidden[:, mask.sum(1).unique() - 1],
    "positions of its own": lambda hidden, mask: hidden[:, torch.arange(5, device=hidden.device)[mask[1]]],
    "numbers of its own": lambda hidden, mask: hidden[:, : torch.tensor([3, 1], device=hidden.device).max()],
    "numbers like another's": lambda hidden, mask: hidden[:, : hidden.new_tensor([3.0, 1.0]).max().int()],
    "few fractions": lambda hidden, mask: hidden[:, : torch.linspace(1, 4, 3, device=hidden.device).round().int()[1]],
    "what it writes in place": _written,
    "rows that it pads": _padded,
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_shapes_that_values_decide_are_those_of_a_real_run(reader):
    real = reader(torch.randn(2, 5, 8), _mask())
    bare = _run(reader, _hidden(), _mask())
    assert bare.is_meta and bare.shape == real.shape and bare.dtype == real.dtype
    assert bare.stride() == real.stride()


@pytest.mark.parametrize(
    ("reader", "operator"),
    [
        (lambda hidden: hidden.sum().item(), "_local_scalar_dense"),
        (lambda hidden: hidden[hidden > 0], "the positions of a tensor of shape \\(2, 5, 8\\), torch.bool"),
        (lambda hidden: hidden.nonzero(), "nonzero"),
        (lambda hidden: hidden.argmax(-1).tolist(), "tolist"),
        (lambda hidden: bool(hidden.isnan().any()), "_local_scalar_dense"),
    ],
)
def test_values_that_nothing_decides_are_refused_by_the_name_of_who_reads_them(reader, operator):
    with pytest.raises(ConfigError, match=f"reads values that no shape and no input of whole numbers.*{operator}"):
        _run(reader, _hidden())


def test_what_unknown_values_are_written_into_is_unknown():
    def forward(hidden, mask):
        counts = mask.sum(1)
        assert counts.tolist() == LENGTHS
        counts[:1] += hidden.argmax(-1)[0, :1]
        return counts[1:].tolist()

    with pytest.raises(ConfigError, match="tolist"):
        _run(forward, _hidden(), _mask())


def test_random_values_are_unknown():
    with pytest.raises(ConfigError):
        _run(lambda hidden: torch.randint(3, (2,), device=hidden.device).tolist(), _hidden())


@pytest.mark.parametrize(("dtype", "most"), [(torch.int64, MOST_WHOLE_NUMBERS), (torch.float32, MOST_FLOATS)])
def test_values_of_many_elements_are_not_kept(dtype, most):
    few = _run(lambda hidden: torch.ones(most, dtype=dtype, device=hidden.device).sum().item(), _hidden())
    assert few == most
    with pytest.raises(ConfigError):
        _run(lambda hidden: torch.ones(most + 1, dtype=dtype, device=hidden.device).sum().item(), _hidden())


def test_an_input_that_has_values_keeps_them_whatever_its_size():
    def forward(image):
        return "none" if torch.all(image == 0) else "some"

    assert _run(forward, torch.zeros(MOST_FLOATS + 1)) == "none"
    assert _run(forward, torch.ones(MOST_FLOATS + 1)) == "some"


def test_what_the_forward_does_to_its_inputs_it_does_to_a_copy():
    mask = _mask()
    assert not _run(lambda mask: mask.zero_().any().item(), mask)
    assert mask.sum(1).tolist() == LENGTHS


def test_views_of_one_storage_stay_views_of_one_storage():
    whole = torch.arange(6)
    a, b = Shapes().take([whole, whole[2:]])
    assert a.untyped_storage() is b.untyped_storage() and b.storage_offset() == 2
    assert _run(lambda a, b: (a.add_(1), b.tolist())[1], whole, whole[2:]) == [3, 4, 5, 6]


def test_the_forward_sees_cpu_tensors_and_moves_none():
    def forward(hidden):
        assert hidden.device == torch.device("cpu")
        with torch.autocast(hidden.device.type, enabled=False):
            assert hidden.to("cpu") is hidden and hidden.to(hidden.device) is hidden and hidden.cpu() is hidden
            assert hidden.to(device=torch.device("cpu"), dtype=hidden.dtype) is hidden
        return hidden.to(torch.device("cpu"), torch.bfloat16) + torch.zeros(8, device="cpu", dtype=torch.bfloat16)

    output = _run(forward, _hidden())
    assert output.is_meta and output.dtype is torch.bfloat16
    assert output.device.type == "meta", "outside the forward nothing is disguised"


def test_a_number_decides_less_about_a_dtype_than_a_tensor():
    output = _run(lambda hidden, mask: torch.where(mask[..., None], 0.0, hidden), _hidden(torch.bfloat16), _mask())
    assert output.dtype is torch.bfloat16


def test_what_is_in_cpu_memory_all_the_same_is_left_as_it_is():
    steps, table = torch.tensor(3), torch.arange(4)

    def forward(hidden):
        steps.add_(1)
        table[1:].add_(hidden.new_tensor([1, 1, 1], dtype=torch.int64))
        return table[:].tolist(), hidden[:, : table[1]] + table[:, None].sum()

    shapes = Shapes()
    assert shapes.stand_in(table).untyped_storage() is shapes.stand_in(table[1:]).untyped_storage()
    written, output = _run(forward, _hidden())
    assert output.is_meta and output.shape == (2, 2, 8)
    assert steps.item() == 3 and table.tolist() == [0, 1, 2, 3]
    assert written == [0, 2, 3, 4]


def test_routers_are_taken_to_choose_evenly():
    def forward(scores):
        chosen = scores.topk(2, dim=-1).indices.flatten()
        return [int((chosen == expert).sum()) for expert in range(3)], scores.topk(2, dim=0).indices.tolist()

    counts, columns = _run(forward, torch.empty(6, 3, device="meta"))
    assert counts == [4, 4, 4]
    assert all(len(set(column)) == 2 and max(column) < 6 for column in zip(*columns, strict=True))


def test_nothing_is_allocated_for_what_has_no_values():
    """One of these would take 40 TB."""
    weight = torch.empty(10**6, 10**7, dtype=torch.float32, device="meta")
    assert _run(lambda hidden, weight: hidden @ weight, torch.empty(10**6, 10**6, device="meta"), weight).is_meta


def test_values_of_conjugate_and_negated_views():
    def forward(lengths):
        number = torch.complex(lengths.float(), lengths.float()).conj()
        return number.imag.tolist(), (number * 1).imag.tolist()

    expected = [0.0, -1.0, -2.0]
    assert _run(forward, torch.arange(3)) == (expected, expected)
