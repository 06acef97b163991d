"""Tests dynamic batching: what is computed together, that nothing is lost, limits, and faults."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from jaxpar.use.serve.batching import Batcher, Latencies, QueueFull


class Doubler:
    """Doubles numbers, once `go` is set, and records the batches. Fails for negative numbers."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = threading.Event()

    def __call__(self, numbers: list[int]) -> Sequence[int]:
        self.go.wait(10)
        self.batches.append(numbers)
        if min(numbers) < 0:
            raise ValueError(f"{min(numbers)} is negative")
        return [2 * number for number in numbers]


def run(test: Callable[[Doubler], Coroutine[Any, Any, None]]) -> list[list[int]]:
    """Run a test with a new Doubler, and return its batches."""
    doubler = Doubler()
    asyncio.run(asyncio.wait_for(test(doubler), 20))
    return doubler.batches


def test_waiting_items_are_computed_together() -> None:
    async def test(doubler: Doubler) -> None:
        batcher = Batcher(doubler, largest=4, most_waiting=100)
        first = asyncio.create_task(batcher([100]))
        await asyncio.sleep(0.05)  # its batch has started
        others = [asyncio.create_task(batcher([number, number + 2])) for number in range(5)]
        await asyncio.sleep(0)
        assert batcher.num_waiting == 10
        doubler.go.set()
        assert await asyncio.gather(first, *others) == [[200], *([2 * n, 2 * n + 4] for n in range(5))]
        assert await batcher([7]) == [14]

    assert run(test) == [[100], [0, 2, 1, 3], [2, 4, 3, 5], [4, 6], [7]]


def test_a_full_queue_refuses_all_items_of_a_request() -> None:
    async def test(doubler: Doubler) -> None:
        batcher = Batcher(doubler, largest=4, most_waiting=3)
        first = asyncio.create_task(batcher([1]))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(batcher([2, 3]))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await batcher([4, 5])
        assert batcher.num_waiting == 2
        doubler.go.set()
        assert (await first, await second) == ([2], [4, 6])

    assert run(test) == [[1], [2, 3]]


def test_a_faulty_item_fails_alone() -> None:
    async def test(doubler: Doubler) -> None:
        batcher = Batcher(doubler, largest=4, most_waiting=9)
        doubler.go.set()
        answers = await asyncio.gather(*(batcher([n]) for n in (1, -2, 3)), return_exceptions=True)
        assert answers[::2] == [[2], [6]]
        assert str(answers[1]) == "-2 is negative"

    assert run(test) == [[1, -2, 3], [1], [-2], [3]]


def test_items_of_clients_that_went_away_are_not_computed() -> None:
    async def test(doubler: Doubler) -> None:
        batcher = Batcher(doubler, largest=1, most_waiting=9)
        first, second, third = (asyncio.create_task(batcher([n])) for n in (1, 2, 3))
        await asyncio.sleep(0.05)
        second.cancel()
        await asyncio.sleep(0)
        doubler.go.set()
        assert (await first, await third) == ([2], [6])

    assert run(test) == [[1], [3]]


def test_latencies() -> None:
    latencies = Latencies(number=100)
    assert latencies.percentile(99) is None
    now = time.perf_counter()
    for seconds in range(150, 0, -1):  # the last 100 are remembered: 100 s to 1 s
        latencies.add(now - seconds)
    assert latencies.num_answered == 150
    assert [round(latencies.percentile(percent) or 0) for percent in (0, 1, 50, 99, 100)] == [1, 1, 50, 99, 100]
