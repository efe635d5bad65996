"""Which storages wait in CPU memory, and which stay on the device."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import ConfigError
from lowtide.runtime.placeholder import Weight, unpack
from lowtide.runtime.store import Store, Ticket
from tests.runtime.stores import made, moved, store_of

pytestmark = pytest.mark.usefixtures("on_the_cpu")


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("table", torch.randn(6, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.table, torch.Tensor)
        return self.frozen(self.linear(x)) * self.table * self.frozen.weight.detach()[:6]


def packed(store: Store, run: Callable[[], torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(tensors that move, tensors that stay) of what ``run`` saves."""
    goes: list[torch.Tensor] = []
    stays: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> Ticket | Weight:
        found = store.pack(tensor)
        (goes if isinstance(found, Ticket) else stays).append(tensor.detach())
        return found

    with saved_tensors_hooks(pack, unpack):
        run().sum().backward()
    return goes, stays


def test_parameters_and_buffers_stay_also_as_views() -> None:
    model = Weights()
    x = torch.randn(6, 16, requires_grad=True) * 1
    goes, stays = packed(store_of(model), lambda: model(x))
    weights = {weight.untyped_storage()._cdata for weight in (*model.parameters(), *model.buffers())}
    assert {tensor.untyped_storage()._cdata for tensor in stays} <= weights
    assert len(stays) >= 3
    assert goes and not {tensor.untyped_storage()._cdata for tensor in goes} & weights


@pytest.mark.parametrize("trained", [True, False])
def test_parameters_stay_without_a_model_to_tell(trained: bool) -> None:
    layer, x = nn.Linear(16, 16).requires_grad_(trained), torch.randn(6, 16, requires_grad=True) * 1
    _, stays = packed(store_of(), lambda: layer(x) * layer.weight[:6])
    assert {tensor.untyped_storage()._cdata for tensor in stays} == {layer.weight.untyped_storage()._cdata}


def test_weights_exchanged_since_the_last_step_stay() -> None:
    model, x = Weights(), torch.randn(6, 16, requires_grad=True) * 1
    store = store_of(model)
    model.table = torch.randn(6, 16)
    store.begin_step(timed=False)
    _, stays = packed(store, lambda: model(x))
    assert model.table.untyped_storage()._cdata in {tensor.untyped_storage()._cdata for tensor in stays}


def test_dequantised_weight_stays() -> None:
    """A quantised layer makes its weight anew at each call; backward needs it anyway, and it is no activation."""
    quantised, x = torch.randint(-8, 8, (16, 16), dtype=torch.int8), torch.randn(6, 16, requires_grad=True) * 1
    goes, stays = packed(store_of(), lambda: F.linear(x, quantised.float() * 0.1).sin())
    assert [tuple(tensor.shape) for tensor in goes] == [(6, 16)]
    assert [tuple(tensor.shape) for tensor in stays] == [(16, 16)]


@pytest.mark.parametrize("trained", [True, False])
def test_weight_cast_by_autocast_stays(trained: bool) -> None:
    layer, x = nn.Linear(16, 16).requires_grad_(trained), torch.randn(6, 16, requires_grad=True) * 1
    with torch.autocast("cpu", torch.bfloat16):
        goes, stays = packed(store_of(layer), lambda: layer(x).sin())
    assert (16, 16) not in [tuple(tensor.shape) for tensor in goes]
    assert (16, 16) in [tuple(tensor.shape) for tensor in stays]


def test_activation_cast_by_autocast_moves() -> None:
    layer, x = nn.Linear(16, 16), torch.randn(6, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        goes, _ = packed(store_of(layer), lambda: layer(x))
    assert [tuple(tensor.shape) for tensor in goes] == [(6, 16)]


class Subclass(torch.Tensor):
    pass


def _nested() -> torch.Tensor:
    return torch._nested_tensor_from_tensor_list([torch.randn(3, 4), torch.randn(2, 4)])  # type: ignore[attr-defined]


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "subclass": lambda: torch.randn(64).as_subclass(Subclass),
    "parameter": lambda: nn.Parameter(torch.randn(64)),
    "leaf that gets a gradient": lambda: torch.randn(64, requires_grad=True),
    "sparse": lambda: torch.eye(64).to_sparse(),
    "sparse rows": lambda: torch.eye(64).to_sparse_csr(),
    "conjugate view": lambda: torch.randn(64, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.randn(64, dtype=torch.complex64).conj().imag,
    "zeros without memory": lambda: torch._efficientzerotensor((64,)),
    "nested": _nested,
    "on the meta device": lambda: torch.empty(64, device="meta"),
    "empty": lambda: torch.empty(0),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("name", ODD)
def test_what_has_no_plain_storage_stays(name: str) -> None:
    store, tensor = store_of(), ODD[name]()
    assert store.move(tensor) is None
    assert store.hold(tensor) is None
    store.flush()
    assert store.counts.d2h_bytes == 0


def test_small_storages_stay() -> None:
    store, x = store_of(min_bytes=1024), made(256)
    assert store.move(x[:2]) is not None  # what counts is the storage
    assert store.move(made(255)) is None


def test_tensors_of_inference_mode_move() -> None:
    store = store_of()
    with torch.inference_mode():
        text = torch.randn(64)
    expected, ticket = text.clone(), moved(store, text)[0]
    assert moved(store, text)[0].entry is ticket.entry
    del text
    assert torch.equal(ticket.take(), expected)


def test_what_is_held_on_the_device_anyway_is_not_copied_and_the_other_way_round() -> None:
    store, held, gone = store_of(), made(64), made(64)
    assert store.hold(held) is None
    assert store.move(held) is None
    tickets = moved(store, gone)
    also = store.hold(gone)
    assert also is not None and also.entry is tickets[0].entry
    del held
    assert all(store.move(made(64)) is not None for _ in range(20))  # some at its address


def test_without_an_accelerator_it_is_an_error() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")

    def outside() -> None:
        with pytest.raises(ConfigError, match=r"needs an accelerator .*cpu_offload"):
            Store()

    worker = threading.Thread(target=outside)  # the simulation is of the thread that asked for it
    worker.start()
    worker.join()
