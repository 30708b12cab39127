"""The same seed, the same examples: seeds of chunks, and Hypothesis without what it picks up from its surroundings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir, storage_directory
from hypothesis.internal.cache import LRUCache
from hypothesis.internal.conjecture import providers

from kvsan.ci.determinism import (
    CHUNK_EXAMPLES,
    chunk_seed,
    chunk_sizes,
    without_folder,
    without_local_constants,
)

ODD = 1_234_567_891_011


def draws() -> list[int]:
    """Return 300 whole numbers drawn with one seed."""
    found: list[int] = []

    @seed(7)
    @settings(
        max_examples=300, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.integers())
    def draw(number: int) -> None:
        found.append(number)

    draw()
    return found


@pytest.fixture
def surrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Hypothesis find a constant in some local module, as it does in a checkout."""
    found = providers.Constants()
    found.add(ODD)
    monkeypatch.setattr(providers, "_get_local_constants", lambda: found)
    monkeypatch.setattr(providers, "CONSTANTS_CACHE", LRUCache(1024))


@pytest.mark.usefixtures("surrounded")
def test_constants_of_local_modules_do_get_into_draws() -> None:
    """Else the stub stubs nothing any more: Hypothesis has moved the hook, and the promise has to be looked at."""
    assert ODD in draws()


def test_campaigns_draw_without_constants_of_local_modules(surrounded: None) -> None:
    with without_local_constants():
        alone = draws()
    assert ODD not in alone
    assert ODD in draws(), "for everybody else the constants are there again"
    with without_local_constants():
        assert draws() == alone, "not even from the cache of what was drawn before"


def test_the_hook_is_put_back(surrounded: None) -> None:
    hook = providers._get_local_constants
    with without_local_constants():
        assert providers._get_local_constants is not hook
        assert not providers._get_local_constants().set_for_type("integer")
    assert providers._get_local_constants is hook
    with pytest.raises(KeyboardInterrupt), without_local_constants():
        raise KeyboardInterrupt
    assert providers._get_local_constants is hook


@pytest.mark.parametrize("name", ["_get_local_constants", "Constants", "CONSTANTS_CACHE"])
def test_a_hypothesis_without_the_hook_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(providers, name)
    with pytest.raises(RuntimeError, match="use another version of Hypothesis"), without_local_constants():
        pass


def test_what_hypothesis_writes_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = storage_directory(intent_to_write=False).home_directory
    try:
        set_hypothesis_home_dir(tmp_path / ".hypothesis")
        with without_folder():
            own = storage_directory("constants")
            own.create_if_missing()
            assert own.path.is_dir()
            assert tmp_path not in own.path.parents
        assert not own.home_directory.exists()
        assert storage_directory(intent_to_write=False).home_directory == tmp_path / ".hypothesis"
    finally:
        set_hypothesis_home_dir(before)
    assert os.listdir(tmp_path) == []


def test_every_chunk_has_a_seed_of_its_own() -> None:
    seeds = {chunk_seed(number, chunk) for number in range(60) for chunk in range(60)}
    assert len(seeds) == 3600
    assert all(0 <= found < 1 << 64 for found in seeds)
    assert chunk_seed(1, 11) != chunk_seed(11, 1)
    assert chunk_seed(0, 0) == 10519678091605982718, "other seeds are other campaigns: say so in the changelog"


@pytest.mark.parametrize("examples", [1, 2, 499, 500, 501, 1000, 1234, 100_000])
def test_chunks_are_full_but_the_last(examples: int) -> None:
    sizes = chunk_sizes(examples)
    assert sum(sizes) == examples
    assert set(sizes[:-1]) <= {CHUNK_EXAMPLES}
    assert 1 <= sizes[-1] <= CHUNK_EXAMPLES


def test_the_same_seed_is_the_same_examples() -> None:
    run: Callable[[], list[int]] = draws
    with without_local_constants():
        assert run() == run()
