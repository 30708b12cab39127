"""``kvsan rules`` and ``kvsan allocators``, the version and the help."""

from __future__ import annotations

import importlib.metadata

import pytest

import kvsan
from kvsan.sim.cache.faulty import FAULTY_CACHES
from kvsan.sim.registry import ALLOCATORS
from kvsan.sim.rules import RULES


def test_rules_are_listed(run) -> None:
    ran = run("rules", "--json")
    assert ran.status == 0
    assert ran.document == {"rules": [{"name": rule.name, "summary": rule.summary} for rule in RULES]}
    report = run("rules")
    assert report.status == 0
    assert all(rule.name in report.out for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_explained(run, rule) -> None:
    explained = {"name": rule.name, "summary": rule.summary, "explanation": rule.explanation}
    assert run("rules", rule.name, "--json").document == {"rules": [explained]}
    report = run("rules", rule.name)
    assert " ".join(rule.explanation.split()) in " ".join(report.out.split())
    assert report.out.startswith(f"{rule.name}: ")


def test_an_unknown_rule_gets_the_nearest_names(run) -> None:
    ran = run("rules", "aliass")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == "kvsan: NAME: unknown rule 'aliass', did you mean alias?\n"
    assert "needs one of bounds, alias, " in run("rules", "zzzz", "--json").err


def test_allocators_are_listed(run) -> None:
    ran = run("allocators", "--json")
    rows = ran.document["allocators"]
    assert ran.status == 0
    assert all(list(row) == ["name", "summary", "kind"] for row in rows)
    assert [row["name"] for row in rows][: len(ALLOCATORS)] == [entry.name for entry in ALLOCATORS]
    of_caches = [row["name"] for row in rows if row["kind"] == "cache-fault"]
    assert of_caches == [entry.name for entry in FAULTY_CACHES]
    assert "trtllm-v2-qsa-packed" in run("allocators").out


def test_plugins_are_listed_without_being_imported(run, monkeypatch) -> None:
    group = "kvsan.allocators"
    points = [
        importlib.metadata.EntryPoint("theirs", "no_such_package_at_all:allocate", group),
        importlib.metadata.EntryPoint("trtllm-v1", "no_such_package_at_all:impostor", group),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: points)
    rows = run("allocators", "--json").document["allocators"]
    assert rows[-1] == {"name": "theirs", "summary": "no_such_package_at_all:allocate", "kind": "plugin"}
    assert [row["kind"] for row in rows if row["name"] == "trtllm-v1"] == ["engine"]


def test_version_and_help(run) -> None:
    assert run("--version") == (0, f"kvsan {kvsan.__version__}\n", "")
    for arguments in ([], ["--help"], ["-h"]):
        ran = run(*arguments)
        assert (ran.status, ran.err) == (0, "")
        assert all(command in ran.out for command in ("check", "matrix", "rules", "allocators"))
    assert "--all-ranks" in run("check", "--help").out
