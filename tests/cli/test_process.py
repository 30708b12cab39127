"""The command as a process of its own: what it imports, how fast it starts, and readers that go away."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvsan.model.layers import AttentionLayer
from kvsan.model.spec import CacheSpec, encode_spec

KVSAN = [sys.executable, "-m", "kvsan"]
HEAVY = ("cupy", "hypothesis", "islpy", "numpy", "torch", "triton")
STARTUP_TIMES = 3
"""How many times as long as its imports a check may take."""

SHOW_MODULES = """
import sys
from kvsan.cli import run
status = run(sys.argv[1:])
print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
raise SystemExit(status)
"""


@pytest.mark.parametrize("options", [["--json"], [], ["--all-ranks", "--tp", "2"]])
def test_a_check_imports_nothing_heavy(reference, options) -> None:
    command = [sys.executable, "-c", SHOW_MODULES, "check", str(reference), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    loaded = set(done.stderr.split())
    assert "kvsan" in loaded
    assert sorted(loaded.intersection(HEAVY)) == []
    assert ("rich" in loaded) == ("--json" not in options)


def test_a_check_starts_quickly(reference) -> None:
    def seconds(*arguments: str) -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        return time.perf_counter() - started

    imports = ("-c", "import numpy, msgspec, typer, rich")
    check = ("-m", "kvsan", "check", str(reference), "--json")
    pairs = [(seconds(*imports), seconds(*check)) for _ in range(5)]
    imports_seconds, check_seconds = (statistics.median(times) for times in zip(*pairs, strict=True))
    assert check_seconds <= STARTUP_TIMES * imports_seconds


@pytest.mark.parametrize("arguments", [["check", "{}", "--json"], ["check", "{}"], ["rules"], ["--help"]])
def test_a_reader_that_goes_away_is_no_error(reference, arguments) -> None:
    command = [argument.format(reference) for argument in arguments]
    process = subprocess.Popen([*KVSAN, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full: /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "{}", "--json"],
        ["check", "{}"],
        ["matrix", "{}", "--layouts", "tp1"],
        ["rules"],
        ["rules", "alias"],
        ["--help"],
        ["check", "--help"],
        ["--version"],
        [],
    ],
    ids=" ".join,
)
def test_a_full_disk_is_one_line(reference, arguments) -> None:
    command = [argument.format(reference) for argument in arguments]
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*KVSAN, *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "kvsan: cannot write the standard output: No space left on device\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_an_interrupt_leaves_no_traceback(reference, tmp_path) -> None:
    slow = "import sys, time\ndef wait(spec):\n    print('waiting', file=sys.stderr, flush=True)\n    time.sleep(60)\n"
    (tmp_path / "slow_allocator.py").write_text(slow, encoding="utf-8")
    command = [*KVSAN, "check", str(reference), "--allocator", "slow_allocator:wait", "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, text=True, bufsize=1
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "kvsan: interrupted\n")


@pytest.mark.parametrize("command", ["check", "matrix"])
def test_threads_that_an_allocator_leaves_keep_no_process_alive(reference, tmp_path, command) -> None:
    text = "import threading, time\nimport kvsan\ndef allocate(spec):\n"
    text += "    threading.Thread(target=time.sleep, args=(3600,)).start()\n"
    text += "    return kvsan.allocate(spec, 'trtllm-v2-qsa-packed')\n"
    (tmp_path / "threaded.py").write_text(text, encoding="utf-8")
    options = {"check": ["--allocator"], "matrix": ["--layouts", "tp1", "--allocators"]}[command]
    done = subprocess.run(
        [*KVSAN, command, str(reference), *options, "threaded:allocate", "--json"],
        capture_output=True,
        cwd=tmp_path,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)


def test_the_document_is_utf_8_whatever_the_terminal(reference, tmp_path) -> None:
    layer = {"kind": "attention", "kv_heads": 1, "head_dim": 64}
    file = tmp_path / "spec.json"
    file.write_text(json.dumps({"kvsan": "spec", "model": "modèle", "layers": [layer]}), encoding="utf-8")
    command = [sys.executable, "-X", "utf8=0", "-m", "kvsan", "check", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout.decode("utf-8"))["spec"]["model"] == "modèle"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["fuzz --allocator fault:canary --max-examples 20 --workers 2", "replay {}"])
def test_closed_standard_streams_disturb_no_child(tmp_path, closed: str, command: str) -> None:
    """Found by hand: the pipe to a child became descriptor 1, and both waited for ever."""
    if command.startswith("replay") and importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    (tmp_path / "spec.json").write_bytes(
        encode_spec(CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=8),), slots=2))
    )
    line = f"{shlex.join(KVSAN)} {command.format('spec.json')} --json {closed}"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == int(command.startswith("fuzz")), done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs file names of any bytes")
@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_names_of_files_that_are_no_text_can_be_reported(tmp_path, json_option) -> None:
    """Every command that names a file in its document."""
    folder = os.fsencode(tmp_path) + b"/bad\xff\xfe"
    os.mkdir(folder)
    fuzzed = [*KVSAN, "fuzz", "--allocator", "fault:canary", "--max-examples", "3", "--cases", folder, *json_option]
    spelled = rb"bad\\udcff\\udcfe" if json_option else rb"bad\udcff\udcfe"  # JSON doubles backslashes
    done = subprocess.run(fuzzed, capture_output=True, check=False, env=os.environ | {"COLUMNS": "300"})
    assert (done.returncode, done.stderr) == (1, b"")
    assert spelled in done.stdout
    (name,) = os.listdir(folder)
    case = folder + b"/" + name
    for command in (["check", case], ["shrink", case]):
        done = subprocess.run([*KVSAN, *command, *json_option], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (1, b"")
        if json_option:
            assert json.loads(done.stdout)
    assert os.listdir(folder) == [name]
