"""``--allocator module:function``: code of the user's own, which may do anything."""

from __future__ import annotations

import sys

import pytest


def test_it_is_found_from_the_current_folder_and_its_prints_stay_out_of_the_document(run, reference, own) -> None:
    ran = run("check", reference, "--allocator", f"{own}:packed", "--json")
    assert ran.status == 0
    assert ran.document["allocator"] == f"{own}:packed"
    assert "printed by an allocator" in ran.err


def test_it_is_asked_for_every_rank(run, reference, own) -> None:
    run("check", reference, "--tp", 2, "--pp", 2, "--allocator", f"{own}:packed", "--all-ranks", "--json")
    assert sys.modules[own].called == [0, 1, 2, 3]


def test_its_faults_are_findings(run, reference, own) -> None:
    ran = run("check", reference, "--allocator", f"{own}:moved", "--json")
    assert (ran.status, ran.document["status"]) == (1, "findings")
    findings = ran.document["findings"]
    assert {"alias", "adjacency"} <= {finding["rule"] for finding in findings}
    assert all(list(finding) == ["rule", "message", "remedy", "where"] for finding in findings)
    assert all("layer" in place for finding in findings for place in finding["where"])


@pytest.mark.parametrize(("function", "kind"), [("bare", "KeyError"), ("leaves", "SystemExit")])
def test_an_error_of_its_own_explains_nothing(run, reference, own, function, kind) -> None:
    ran = run("check", reference, "--allocator", f"{own}:{function}", "--json")
    assert (ran.status, ran.document["status"]) == (1, "rejected")
    assert ran.document["rejection"]["rule"] == "unexplained-rejection"
    assert kind in ran.document["rejection"]["message"]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("number", "returned 3, needs a kvsan.Layout"),
        ("junk", "layout.buffers[0]: found 1, needs a Buffer"),
        ("two", "cannot be called with one argument"),
        ("Class", "is a class"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_what_is_no_allocator_is_bad_input(run, reference, own, function, words) -> None:
    ran = run("check", reference, "--allocator", f"{own}:{function}", "--json")
    assert (ran.status, ran.out) == (2, "")
    last_line = ran.err.splitlines()[-1]
    assert last_line.startswith("kvsan: --allocator: ")
    assert words in last_line
    assert not {"two", "Class"} & set(map(str, sys.modules[own].called))


@pytest.mark.parametrize("name", ["os:system", "os:_exit", "builtins:print", "shutil:rmtree", "subprocess:call"])
def test_pythons_own_functions_are_refused_without_being_called(run, reference, name) -> None:
    ran = run("check", reference, "--allocator", name)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == (
        f"kvsan: --allocator: '{name}' is part of Python's own library, needs a Python function that takes a CacheSpec "
        "and returns a Layout\n"
    )


def test_an_interrupt_ends_with_130(run, reference, own) -> None:
    ran = run("check", reference, "--allocator", f"{own}:interrupted", "--json")
    assert (ran.status, ran.out, ran.err) == (130, "", "kvsan: interrupted\n")
