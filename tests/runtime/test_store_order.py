"""The order in which copies begin and are waited for, and the time that they take."""

import pytest
import torch

from tests.runtime.links import LateLink, use_link
from tests.runtime.stores import assert_gave_all_back, deep, gradients, moved, store_of
from tests.runtime.toys import chain, inputs, step

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def test_order_of_calls(late: LateLink) -> None:
    model, x = chain(3), inputs()
    store = store_of(model, in_flight_bytes=2000, prefetch_bytes=2000)
    for _ in range(3):
        gradients(store, model, x)
    calls, copied, returned = late.log, set(), set()
    for place, (name, about) in enumerate(calls):
        if name == "copy_out":
            since = [n for n, _ in calls[:place] if n in ("copy_out", "source_is_ready")]
            assert since[-1] == "source_is_ready"
        elif name == "copy_in":
            since = [n for n, _ in calls[:place] if n in ("copy_in", "target_is_free")]
            assert since[-1] == "target_is_free"
            assert "buffer_is_full" in [n for n, _ in calls[:place]]
        elif name == "source_may_go":
            copied.add(id(about))
        elif name == "target_is_ready":
            returned.add(id(about))
    names = late.calls()
    assert names.count("target_is_ready") >= names.count("copy_in") > 0
    assert "buffer_is_free" in names  # the second step's copies out go to buffers of the first one's
    assert names.index("buffer_is_free") > names.index("copy_in")
    assert copied and returned


def test_a_buffer_that_is_used_again_is_waited_for(late: LateLink) -> None:
    store = store_of(in_flight_bytes=0)
    ticket = moved(store, torch.ones(64))[0]
    value = ticket.take()
    del ticket
    late.log.clear()
    again = moved(store, torch.zeros(64))[0]
    assert [name for name, _ in late.log[:3]] == ["source_is_ready", "buffer_is_free", "copy_out"]
    assert late.log[1][1].lane is late.back
    assert torch.equal(value, torch.ones(64))
    assert torch.equal(again.take(), torch.zeros(64))


@pytest.mark.parametrize("ordering", ["source_may_go", "target_is_ready"])
def test_leaving_an_ordering_out_shows(monkeypatch: pytest.MonkeyPatch, ordering: str) -> None:
    """The late link would not notice if the store never called it."""
    link = LateLink(without={ordering})
    use_link(monkeypatch, link)
    model, x = chain(3), inputs()
    plain, store = step(model, lambda: model(x)), store_of(model, in_flight_bytes=0)
    found = gradients(store, model, x)
    link.finish()
    assert link.violations or not all(torch.equal(plain[name], found[name]) for name in plain)  # type: ignore[arg-type]


@pytest.mark.parametrize("without", [(), ("target_may_go",)])
def test_a_target_that_nobody_reads_is_waited_for(monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...]) -> None:
    link = LateLink(without)
    use_link(monkeypatch, link)
    store, x = store_of(in_flight_bytes=0), torch.randn(64, requires_grad=True)
    output, _ = deep(store, 10, x)
    last = output.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert last is not None and last._saved_self is not None  # type: ignore[attr-defined]
    assert store.ahead_bytes > 0
    del output, last
    link.finish()
    assert bool(link.violations) == bool(without)
    assert_gave_all_back(store)


def test_buffers_are_waited_for_before_they_are_freed(late: LateLink) -> None:
    store = store_of(in_flight_bytes=10**9)
    ticket = moved(store, torch.ones(64))[0]
    store.close()
    assert store.pool.total_bytes > 0  # its graph lives
    del ticket
    assert store.pool.total_bytes == 0
    late.finish()
    assert late.violations == []


def test_times_of_host_copies_are_exposed_ones() -> None:
    model, x, store = chain(), inputs(), store_of()
    store.begin_step(timed=True)
    gradients(store, model, x)
    copies = store.copies()
    assert copies.hidden_copy_ms == 0 and copies.exposed_copy_ms > 0
    assert copies.d2h_bytes == copies.h2d_bytes > 0
    assert copies.pool["in_use_bytes"] == 0 and copies.pool["pageable_bytes"] == store.pool.total_bytes
