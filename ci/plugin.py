"""The pytest plugin: saved cases and campaigns as tests of any project.

    pytest --kvsan-cases cases/                                             # every saved case is a test
    pytest --kvsan-profile ci --kvsan-allocator trtllm-v2 -n 2              # a campaign, spread over the workers
    pytest --kvsan-profile ci --kvsan-allocator engine.cache:allocate --kvsan-save cases/

pytest loads this module in every project of an environment that has kvsan, so it imports pytest alone; what collects
and runs (``plugin_items``) is imported when one of the options is given.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; none has an effect unless given."""
    group = parser.getgroup("kvsan", "KV-cache layouts (kvsan)")
    group.addoption(
        "--kvsan-cases",
        action="append",
        default=[],
        metavar="DIR_OR_FILE",
        help="collect saved cases as tests that fail while a case breaks a rule (repeatable)",
    )
    group.addoption(
        "--kvsan-profile",
        metavar="dev|ci|nightly",
        help="add a campaign of this profile, split into several tests, for each --kvsan-allocator",
    )
    group.addoption(
        "--kvsan-allocator",
        action="append",
        default=[],
        metavar="NAME",
        help="allocator to fuzz, or module:function of your own, which saved cases may then name too (repeatable)",
    )
    group.addoption(
        "--kvsan-save",
        metavar="DIR",
        help="save the reduced cases that campaigns find in this folder",
    )
    group.addoption(
        "--kvsan-seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the campaigns (default: 0, the same examples every time)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect cases and campaigns where the options ask for them; a wrong option is a usage error of one line."""
    if config.getoption("kvsan_cases") or config.getoption("kvsan_profile"):
        from .plugin_items import collection_of

        config.addinivalue_line("markers", "kvsan: a saved case or a part of a campaign of kvsan")
        config.pluginmanager.register(collection_of(config), "kvsan-items")
