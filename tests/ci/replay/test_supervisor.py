"""Supervision: a child that dies, hangs or babbles costs the one case that made it do so, and no child is left."""

from __future__ import annotations

import sys

import msgspec
import pytest

from kvsan.ci.replay.messages import LayoutJob, Outcome, SpecJob
from kvsan.ci.replay.supervisor import ReplayOptions, Supervisor
from kvsan.model.errors import SpecError
from kvsan.model.layers import AttentionLayer
from kvsan.model.spec import CacheSpec, encode_spec
from kvsan.sim.registry import allocate

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX pipes and signals")


def spec_of(model: str) -> CacheSpec:
    return CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=64),), tokens_per_block=1, slots=1, model=model)


def job(model: str) -> SpecJob:
    return SpecJob(encode_spec(spec_of(model)), "trtllm-v2")


def outcomes(fake_child, models, **options) -> tuple[list[Outcome], Supervisor]:
    """Replay cases named after what they do; return what came of each, in order."""
    settings = {"device": "cpu", "max_bytes": 1 << 20, "case_seconds": 30, **options}
    supervisor = Supervisor(ReplayOptions(**settings), command=fake_child.command)
    jobs = [job(model) if isinstance(model, str) else model for model in models]
    found = list(supervisor.run(iter(jobs)))
    assert [number for number, _ in found] == list(range(len(jobs)))
    fake_child.require_gone()
    return [outcome for _, outcome in found], supervisor


def test_results_come_in_the_order_of_the_cases(fake_child) -> None:
    names = [f"case {number}" for number in range(50)]
    found, supervisor = outcomes(fake_child, names, workers=2, batch_cases=4)
    assert [outcome.digest for outcome in found] == [f"digest of {name}" for name in names]
    assert {outcome.status for outcome in found} == {"clean"}
    assert len(fake_child.pids) == 2
    assert (supervisor.device_name, supervisor.versions, supervisor.notes) == ("made up", {"made up": "1.0"}, [])


FAULTS = {
    "segfault": "it was ended by signal 11 (SIGSEGV)",
    "exit": "it ended with status 7: last words",
    "corrupt": "it sent what is no answer",
    "endless": "a message of 4294967295 B",
    "illegal": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "wrong": "ValueError: a bug in the replay",
}


def test_crashes_are_put_down_to_their_cases_and_the_others_still_run(fake_child) -> None:
    found, supervisor = outcomes(fake_child, ["a", *FAULTS, "b"])
    assert [outcome.status for outcome in found] == ["clean", *["crashed"] * len(FAULTS), "clean"]
    assert [found[0].digest, found[-1].digest] == ["digest of a", "digest of b"]
    for outcome, words in zip(found[1:-1], FAULTS.values(), strict=True):
        (finding,) = outcome.findings
        assert finding.rule == "replay-mismatch"
        assert finding.message.startswith("the device crashed on this case, replayed alone: ")
        assert words in finding.message
        assert outcome.digest is None
    assert supervisor.notes == []
    assert len(fake_child.pids) == 1 + 5 + 1, "the one that noticed, one for each that died, and one for the rest"


def test_an_error_after_which_the_device_works_ends_no_child(fake_child) -> None:
    found, _ = outcomes(fake_child, ["a", "wrong", "b"])
    assert [outcome.status for outcome in found] == ["clean", "crashed", "clean"]
    assert len(fake_child.pids) == 1


def test_a_hanging_case_is_ended(fake_child) -> None:
    found, _ = outcomes(fake_child, ["a", "hang", "b"], case_seconds=2)
    assert [outcome.status for outcome in found] == ["clean", "crashed", "clean"]
    assert "no answer within 2 s" in found[1].findings[0].message


def test_what_a_case_prints_is_no_answer(fake_child) -> None:
    found, supervisor = outcomes(fake_child, ["a", "loud", "b"])
    assert [outcome.status for outcome in found] == ["clean"] * 3
    assert supervisor.notes == []


def test_a_crash_that_no_case_repeats_is_told(fake_child) -> None:
    found, supervisor = outcomes(fake_child, ["a", "crowd", "b"])
    assert [outcome.status for outcome in found] == ["clean"] * 3
    assert supervisor.notes == [
        "a batch was lost (it ended with status 3), and no case of it does that alone",
    ]


def test_what_is_settled_already_keeps_its_place(fake_child) -> None:
    settled = Outcome(status="bad-input", message="no case")
    models = [settled, "a", settled, settled, "exit", "b", *[settled] * 300, "c", settled]
    found, _ = outcomes(fake_child, models, batch_cases=2)
    assert [outcome.digest for outcome in found if outcome.status == "clean"] == [f"digest of {name}" for name in "abc"]
    assert [place for place, outcome in enumerate(found) if outcome.status != "bad-input"] == [1, 4, 5, 306]


def test_nothing_but_settled_cases_start_no_child(fake_child) -> None:
    assert outcomes(fake_child, [Outcome(status="bad-input")] * 100)[0] == [Outcome(status="bad-input")] * 100
    assert outcomes(fake_child, [])[0] == []
    assert fake_child.pids == []


def test_layouts_travel_as_they_are(fake_child) -> None:
    layout = allocate(spec_of("mine"), "trtllm-v2")
    found, _ = outcomes(fake_child, [LayoutJob(msgspec.structs.replace(layout, allocator="mine:allocate"))])
    assert (found[0].status, found[0].digest) == ("clean", "digest of mine")
    assert found[0].size_bytes == sum(pool.size_bytes for pool in layout.pools) > 0


def test_a_refused_spec_is_rejected_in_its_place(fake_child) -> None:
    refused = SpecJob(encode_spec(spec_of("x")), "fault:bare-assert")
    bad = SpecJob(b"{}", "trtllm-v2")
    found, _ = outcomes(fake_child, ["a", refused, bad, SpecJob(encode_spec(spec_of("x")), "no-such"), "b"])
    assert [outcome.status for outcome in found][2:] == ["refused", "refused", "clean"]
    assert found[0].status == "clean"
    assert "unknown allocator 'no-such'" in (found[3].message or "")


def test_a_device_that_cannot_be_opened_is_bad_input(fake_child) -> None:
    (fake_child.folder / "closed").touch()
    with pytest.raises(SpecError, match=r"^device: no device today$"):
        outcomes(fake_child, ["a"])
    fake_child.require_gone()
    (fake_child.folder / "closed").unlink()
    (fake_child.folder / "dead").touch()
    with pytest.raises(SpecError, match="cpu cannot be opened in a child process: it ended with status 5"):
        outcomes(fake_child, ["a"])
    fake_child.require_gone()
    with pytest.raises(SpecError, match="cannot start no-such-program"):
        list(Supervisor(ReplayOptions(device="cpu", max_bytes=1), command=["no-such-program"]).run([job("a")]))


def test_a_device_that_is_lost_ends_the_run_with_what_there_is(fake_child) -> None:
    supervisor = Supervisor(ReplayOptions(device="cpu", max_bytes=1 << 20, batch_cases=1), command=fake_child.command)
    found = []

    def replay() -> None:
        for _, outcome in supervisor.run([job("a"), job("exit"), job("b")]):
            found.append(outcome.status)
            (fake_child.folder / "dead").touch()

    with pytest.raises(SpecError, match="cannot be opened in a child process"):
        replay()
    assert found == ["clean", "crashed"]
    fake_child.require_gone()


def test_an_interrupt_gives_what_is_finished_and_leaves_nobody(fake_child) -> None:
    """Case 0 hangs, and those behind it are done by another child when the interrupt comes."""

    def jobs():
        yield job("hang")
        yield from [job(f"case {number}") for number in range(4)]
        raise KeyboardInterrupt

    supervisor = Supervisor(
        ReplayOptions(device="cpu", max_bytes=1 << 20, batch_cases=1, workers=2), command=fake_child.command
    )
    found = []
    with pytest.raises(KeyboardInterrupt):
        found.extend((number, outcome.status) for number, outcome in supervisor.run(jobs()))
    assert found == [(number, "clean") for number in range(1, 5)]
    fake_child.require_gone()


def test_leaving_early_leaves_nobody(fake_child) -> None:
    supervisor = Supervisor(ReplayOptions(device="cpu", max_bytes=1 << 20), command=fake_child.command)
    for _ in supervisor.run([job("a"), job("hang")]):
        break
    supervisor.close()
    fake_child.require_gone()


def test_a_wrapper_runs_the_child_and_its_errors_are_told(fake_child, tmp_path, capfd) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text('#!/bin/sh\necho "========= the report"\n"$@"\nexit 86\n', encoding="utf-8")
    wrapper.chmod(0o755)
    options = ReplayOptions(device="cpu", max_bytes=1 << 20, wrapper=(str(wrapper),))
    supervisor = Supervisor(options, command=fake_child.command, stderr=sys.stderr)
    assert [outcome.status for _, outcome in supervisor.run([job("a")])] == ["clean"]
    assert supervisor.notes == [f"{wrapper} ended with status 86: it has found errors, see its report above"]
    assert "========= the report" in capfd.readouterr().err
    fake_child.require_gone()
