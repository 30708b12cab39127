"""The report of the GPU suite, from results made up here; the results themselves need a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvsan.ci import gpu_suite
from kvsan.ci.gpu_suite import Counts, Ran, counts, main, report

BENCH = {
    "bandwidth": {
        "pool_bytes": 68719476736,
        "views": 168,
        "ceiling_gb_per_s": 4000.0,
        "passes": [{"name": "stamp", "bytes": 68719476736, "ms": 18.5, "gb_per_s": 3714.6, "of_ceiling": 0.9286}],
    },
    "throughput": {
        "layouts": 6000,
        "mean_bytes": 123456.0,
        "findings": 0,
        "per_second": 1234.5,
        "baseline_layouts": 256,
        "baseline_findings": 0,
        "baseline_per_second": 99.9,
        "speedup": 12.36,
    },
}
MOVED = {
    "pairs": [
        {
            "source": "tp1", "destination": "tep4", "copies": 676, "blocks": 54, "bytes": 4236198912, "ms": 2.14,
            "plain_ms": 1.99, "of_plain_copy": 0.93,
        }
    ]
}  # fmt: skip
JUNIT = '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>'


class Commands:
    """Stands for the machine: answers commands by a word in them, and notes what was asked."""

    def __init__(self, **answers: Ran) -> None:
        good = Ran(0, "", "", 1.0)
        self.answers = {
            "nvidia-smi": Ran(0, "NVIDIA H200, 570.1, 143771 MiB\n", "", 0.1),
            "-c": Ran(0, 'noise\n{"torch": "2.9", "cupy": "14.0"}\n', "", 1.0),
            "pytest": good,
            "replay": Ran(0, json.dumps(BENCH), "", 100.0),
            "transfer": Ran(0, json.dumps(MOVED), "", 10.0),
            **{name.replace("nvidia", "nvidia-smi"): ran for name, ran in answers.items()},
        }
        self.junit = '<testsuites><testsuite tests="12" failures="0" errors="0" skipped="0"/></testsuites>'
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str]) -> Ran:
        word = next(word for word in self.answers if word in command)
        self.asked.append(word)
        for argument in command:
            if argument.startswith("--junitxml="):
                Path(argument.partition("=")[2]).write_text(self.junit, encoding="utf-8")
        return self.answers[word]


def test_the_report_has_the_machine_the_versions_and_the_numbers(tmp_path, monkeypatch) -> None:
    commands = Commands()
    monkeypatch.setattr(gpu_suite, "run", commands)
    assert main(["--out", str(tmp_path / "report.md")]) == 0
    assert commands.asked == ["nvidia-smi", "-c", "pytest", "replay", "transfer"]
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for words in (
        "| NVIDIA H200 | 570.1 | 143771 MiB |",
        "torch 2.9, cupy 14.0",
        "12 passed, 0 failed, 0 skipped",
        "| stamp | 68,719,476,736 | 18.50 | 3,715 | 0.929 |",
        "4,000 GB/s",
        "1,234 per second",
        "12.4 times as many",
        "| tp1 to tep4 | 676 | 54 | 4,236,198,912 | 2.14 | 1.99 | 0.93 |",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        (Commands(pytest=Ran(1, "FAILED test_x", "", 2.0)), "FAILED test_x"),
        (Commands(replay=Ran(2, "", "kvsan: no memory", 2.0)), "kvsan: no memory"),
        (Commands(transfer=Ran(2, "", "kvsan: no room", 2.0)), "kvsan: no room"),
    ],
)
def test_what_fails_is_in_the_report_and_the_status(tmp_path, monkeypatch, commands, words) -> None:
    monkeypatch.setattr(gpu_suite, "run", commands)
    assert main(["--out", str(tmp_path / "report.md")]) == 1
    assert words in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_tests_that_were_all_skipped_are_no_success(tmp_path, monkeypatch) -> None:
    commands = Commands()
    commands.junit = '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="3"/></testsuites>'
    monkeypatch.setattr(gpu_suite, "run", commands)
    assert main(["--out", str(tmp_path / "report.md")]) == 1


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        (Commands(nvidia=Ran(None, "", "no such file", 0.0)), "nvidia-smi finds no NVIDIA GPU"),
        (
            Commands(**{"-c": Ran(1, "", "Traceback\nImportError: no cupy", 0.0)}),
            "cannot be loaded: ImportError: no cupy",
        ),
    ],
)
def test_a_machine_without_a_gpu_is_one_line(tmp_path, monkeypatch, capsys, commands, words) -> None:
    monkeypatch.setattr(gpu_suite, "run", commands)
    assert main(["--out", str(tmp_path / "report.md")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "report.md").exists()


def test_a_place_that_cannot_be_written_keeps_the_report(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu_suite, "run", Commands())
    assert main(["--out", str(tmp_path / "nowhere" / "report.md")]) == 2
    assert "# GPU suite" in capsys.readouterr().out


def test_counts_of_a_test_run(tmp_path) -> None:
    (tmp_path / "results.xml").write_text(JUNIT, encoding="utf-8")
    assert counts(tmp_path / "results.xml") == Counts(5, 2, 2)
    (tmp_path / "broken.xml").write_text("<", encoding="utf-8")
    assert counts(tmp_path / "broken.xml") == counts(tmp_path / "none.xml") == Counts(0, 0, 0)


def test_a_report_on_several_gpus() -> None:
    text = report("A, 1, 2\nB, 1, 2", {}, Ran(0, "", "", 0), Counts(1, 0, 0), Ran(1, "", "", 0), Ran(1, "", "", 0))
    assert "| A | 1 | 2 |\n| B | 1 | 2 |" in text
