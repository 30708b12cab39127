"""Chunks of a campaign in worker processes: their order, and a worker that dies."""

from __future__ import annotations

import os
import signal

import pytest

from kvsan.ci.chunked import chunks_in_order
from kvsan.model.errors import SpecError


def number_of(chunk: int, examples: int) -> int:
    return 100 * chunk + examples


def dies_in_the_third(chunk: int, examples: int) -> int:
    if chunk == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return chunk


def leaves(chunk: int, examples: int) -> int:
    os._exit(3)


@pytest.mark.parametrize("workers", [1, 2])
def test_chunks_come_in_order_from_any_number_of_workers(workers: int) -> None:
    tasks = [(chunk, chunk % 3) for chunk in range(7)]
    assert list(chunks_in_order(number_of, iter(tasks), workers)) == [number_of(*task) for task in tasks]


@pytest.mark.parametrize("work", [dies_in_the_third, leaves])
def test_a_worker_that_dies_is_one_line(work) -> None:
    with pytest.raises(SpecError, match=r"workers: a worker process died at work on .*run again with --workers 1"):
        list(chunks_in_order(work, ((chunk, 1) for chunk in range(6)), 2))
