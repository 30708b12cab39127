"""``kvsan replay``: the command around the replay, with the real engine on the host and with children made up."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kvsan.ci.cases import Case, load_case, save_case, spec_of
from kvsan.ci.replay import supervisor
from kvsan.model.layers import AttentionLayer, LatentLayer
from kvsan.model.spec import CacheSpec, encode_spec
from kvsan.sim.arena import Arena
from kvsan.sim.arena.findings import MEMORY_RULES
from kvsan.sim.cache.trace import Trace
from kvsan.sim.registry import allocate

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "examples" / "cases"
FAKE_CHILD = ROOT / "tests" / "ci" / "replay" / "fake_child.py"
SOUND = CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=64),), tokens_per_block=2, slots=2)
LATENT = CacheSpec(layers=(LatentLayer(latent_dim=32, rope_dim=16),) * 2, tokens_per_block=1, slots=3)

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX pipes and signals")
needs_engine = pytest.mark.skipif(sys.platform != "linux", reason="needs Triton, which is for Linux")
pytestmark = needs_posix


class Replayed(NamedTuple):
    """A folder and the document of a run over it."""

    folder: Path
    status: int
    document: Any
    err: str

    def entry(self, name: str) -> Any:
        """The entry of one file."""
        (entry,) = [entry for entry in self.document["cases"] if Path(entry["case"]).name == name]
        return entry


def skip_without_kernels() -> None:
    """Look, and import nothing: Triton decides when it is imported whether this process interprets its kernels."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    """Replay a folder of shipped cases, sound specs and hostile files with the real engine on the host, once."""
    skip_without_kernels()
    folder = tmp_path_factory.mktemp("cases")
    for file in CASES.glob("*.json"):
        shutil.copy(file, folder)
    (folder / "sound.json").write_bytes(encode_spec(SOUND))
    (folder / "latent.json").write_bytes(encode_spec(LATENT))
    (folder / "large.json").write_bytes(encode_spec(msgspec.structs.replace(SOUND, slots=10_000)))
    trace = load_case(CASES / "traces" / "prefix-hit-mid-block.json")
    assert isinstance(trace.input, Trace)
    few = msgspec.structs.replace(trace.input, operations=trace.input.operations[:3])
    shutil.move(save_case(Case(allocator=trace.allocator, input=few), folder), folder / "trace.json")
    foreign = Case(allocator="os:system", input=few)
    shutil.move(save_case(foreign, folder), folder / "trace of code.json")
    (folder / "bytes.json").write_bytes(b"\xff\x00 garbage")
    (folder / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    (folder / "newer.json").write_text('{"kvsan": "case", "version": 99}', encoding="utf-8")
    (folder / "gone.json").symlink_to(folder / "nowhere")
    (folder / "a folder.json").mkdir()
    os.mkfifo(folder / "pipe.json")
    shutil.move(save_case(Case(allocator="os:system", input=SOUND), folder), folder / "code.json")
    options = ["--device", "cpu", "--max-memory", "16KiB", "--json"]
    command = [sys.executable, "-m", "kvsan", "replay", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Replayed(folder, done.returncode, json.loads(done.stdout), done.stderr)


def test_a_folder_is_replayed_whole_and_in_order(replayed) -> None:
    assert replayed.status == 1
    lines = replayed.err.splitlines()
    assert all(line.startswith("kvsan: ") and " of 15 cases replayed: " in line for line in lines), "progress alone"
    names = [Path(entry["case"]).name for entry in replayed.document["cases"]]
    assert names == sorted(names)
    assert len(names) == 15
    document = replayed.document
    assert document["device"] == "cpu"
    assert set(document["versions"]) == {"python", "numpy", "torch", "triton"}
    assert document["interrupted"] is False
    assert document["notes"] == []
    summary = document["summary"]
    assert (summary["clean"], summary["findings"], summary["rejected"], summary["bad_input"]) == (4, 2, 1, 8)
    assert summary["bytes"] == sum(entry["bytes"] for entry in document["cases"])


def test_sound_layouts_are_clean_with_the_digest_of_the_simulator(replayed) -> None:
    for name, spec in (("sound.json", SOUND), ("latent.json", LATENT)):
        entry = replayed.entry(name)
        arena = Arena.build(allocate(spec))
        assert (entry["status"], entry["findings"], entry["notes"]) == ("clean", [], [])
        assert entry["digest"] == arena.digest()
        assert entry["bytes"] == sum(pool.size_bytes for pool in arena.layout.pools)
        assert entry["compared_on_host"] is True
        assert entry["allocator"] == "trtllm-v2"


def test_a_trace_is_replayed_beside_the_layouts(replayed) -> None:
    entry = replayed.entry("trace.json")
    assert (entry["status"], entry["findings"]) == ("clean", [])
    assert len(entry["digest"]) == 32
    assert entry["notes"][0].startswith("3 operations, 0 refused; ")


def test_a_case_that_does_not_fit_loses_slots_and_says_so(replayed) -> None:
    entry = replayed.entry("large.json")
    assert entry["status"] == "clean"
    assert 0 < entry["bytes"] <= 16 << 10
    (note,) = entry["notes"]
    assert "a replay in 16384 B holds fewer slots than asked for" in note
    assert "instead of 10000" in note


def test_the_shipped_cases_break_their_memory_rules_and_no_others(replayed) -> None:
    for file in CASES.glob("*.json"):
        entry, case = replayed.entry(file.name), load_case(file)
        recorded = {found.rule for found in case.found}
        if "rejected" in recorded:
            assert (entry["status"], entry["digest"], entry["findings"]) == ("rejected", None, [])
            assert (entry["rejection"]["rule"], entry["rejection"]["message"]) == ("rejected", case.found[0].message)
            continue
        assert entry["status"] == "findings"
        assert {found["rule"] for found in entry["findings"]} == recorded.intersection(MEMORY_RULES)
        # what memory holds is predicted but for the bytes of consumers that stray, so the digest is the simulator's
        assert entry["digest"] == Arena.build(allocate(spec_of(case), case.allocator)).digest()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bytes.json", "not UTF-8 text"),
        ("deep.json", "nested too deeply"),
        ("newer.json", "this kvsan reads up to"),
        ("gone.json", "gone.json"),
        ("a folder.json", "a folder.json"),
        ("pipe.json", "pipe.json"),
        ("trace of code.json", "code is never loaded because a file says so"),
        ("code.json", "code is never loaded because a file says so"),
    ],
)
def test_a_bad_file_in_a_folder_is_an_entry_of_its_own(replayed, name, words) -> None:
    entry = replayed.entry(name)
    assert (entry["status"], entry["digest"], entry["findings"], entry["allocator"]) == ("bad-input", None, [], None)
    assert words in entry["message"]


@needs_engine
def test_a_case_that_crashes_the_real_engine(run, tmp_path, monkeypatch) -> None:
    """Address 0 is read while the real replayer works: the case is named, and the others are replayed."""
    skip_without_kernels()
    monkeypatch.setattr(supervisor, "COMMAND", fake_command(tmp_path))
    (tmp_path / "real").touch()
    files = write_specs(tmp_path, "first", "segfault", "last")
    ran = run("replay", *files, "--json")
    assert ran.status == 1
    first, crashed, last = ran.document["cases"]
    assert [first["status"], crashed["status"], last["status"]] == ["clean", "crashed", "clean"]
    assert first["digest"] == last["digest"] == Arena.build(allocate(SOUND)).digest()
    assert crashed["case"] == str(files[1])
    (finding,) = crashed["findings"]
    assert finding["rule"] == "replay-mismatch"
    assert "signal 11 (SIGSEGV)" in finding["message"]
    assert ran.document["summary"]["crashed"] == 1


def fake_command(folder: Path) -> tuple[str, ...]:
    """Return the command of children that do what a case's model is called."""
    (folder / "pids").mkdir()
    return (sys.executable, "-P", str(FAKE_CHILD), str(folder))


def write_specs(folder: Path, *models: str) -> list[Path]:
    """Write a spec for each model; return the files."""
    files = [folder / f"{place} {model}.json" for place, model in enumerate(models)]
    for file, model in zip(files, models, strict=True):
        file.write_bytes(encode_spec(msgspec.structs.replace(SOUND, model=model)))
    return files


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have children with a made-up device; return a folder for cases."""
    monkeypatch.setattr(supervisor, "COMMAND", fake_command(tmp_path))
    folder = tmp_path / "cases"
    folder.mkdir()
    return folder


def test_the_report_names_what_is_wrong_and_sums_up(run, fake) -> None:
    write_specs(fake, "sound", "wrong")
    (fake / "x.json").write_text("{}", encoding="utf-8")
    ran = run("replay", fake)
    assert ran.status == 1
    words = " ".join(ran.out.split())
    assert "✓ clean" in words
    assert "0 sound.json (trtllm-v2)" in words
    assert "digest digest of sound" in words
    assert "✗ crashed" in words
    assert "replay-mismatch: the device crashed on this case, replayed alone: ValueError: a bug in the replay" in words
    assert "✗ no case" in words
    assert "3 cases on cpu: 1 clean, 1 crashed, 1 bad-input;" in words
    assert "made up; made up 1.0" in words


def test_the_exit_status_says_what_came_of_it(run, fake) -> None:
    files = write_specs(fake, "sound", "other")
    assert run("replay", *files).status == 0
    assert run("replay", fake).status == 0
    (fake / "x.json").write_text("{}", encoding="utf-8")
    ran = run("replay", fake, "--json")
    assert (ran.status, [entry["status"] for entry in ran.document["cases"]]) == (2, ["clean", "clean", "bad-input"])
    assert run("replay", files[0], "--allocator", "fault:bare-assert").status == 0, "it asserts on a collision alone"


def test_a_crash_that_no_case_repeats_is_not_hidden(run, fake) -> None:
    files = write_specs(fake, "a", "crowd")
    ran = run("replay", *files, "--json")
    assert [entry["status"] for entry in ran.document["cases"]] == ["clean", "clean"]
    assert len(ran.document["notes"]) == 1
    assert ran.status == 1


def test_many_cases_over_workers(run, fake) -> None:
    write_specs(fake, *["sound"] * 500)
    ran = run("replay", fake, "--workers", "2")
    assert ran.status == 0
    assert "500 cases on cpu: 500 clean" in " ".join(ran.out.split())
    assert len(list((fake.parent / "pids").iterdir())) == 2


def test_a_model_is_deployed_as_check_does(run, fake, reference) -> None:
    for source in (reference, reference.parent):
        ran = run("replay", source, "--layout", "tp2", "--kv-dtype", "fp8", "--json")
        assert ran.status == 0
        (entry,) = ran.document["cases"]
        assert (entry["case"], entry["allocator"]) == (str(source), "trtllm-v2-qsa-packed")
    expected = run("check", reference, "--layout", "tp2", "--kv-dtype", "fp8", "--json").document["pools"]
    assert entry["bytes"] == sum(pool["slots"] * pool["slot_bytes"] for pool in expected)
    ran = run("replay", reference, "--layout", "tp2", "--kv-dtype", "fp8", "--allocator", "trtllm-v2-qsa-legacy")
    assert ran.status == 1
    assert "✗ refused by its allocator" in ran.out
    assert "Layer 7's K page starts 24576 B into its pool slot" in " ".join(ran.out.split())


def test_allocators_of_somebodys_own_run_in_this_process(run, fake, own) -> None:
    """Their layouts travel; what is no layout is bad usage for a file that is named."""
    (file,) = write_specs(fake, "sound")
    ran = run("replay", file, "--allocator", f"{own}:packed", "--json")
    assert (ran.status, ran.document["cases"][0]["status"]) == (0, "clean")
    assert ran.document["cases"][0]["allocator"] == f"{own}:packed"
    assert "printed by an allocator" in ran.err
    ran = run("replay", file, "--allocator", f"{own}:bare", "--json")
    assert (ran.status, ran.document["cases"][0]["rejection"]["rule"]) == (1, "unexplained-rejection")
    for name, words in (("junk", "returned a layout that cannot be checked"), ("number", "returned 3")):
        ran = run("replay", file, "--allocator", f"{own}:{name}", "--json")
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.splitlines()[-1].startswith(f"kvsan: --allocator: {own}:{name}: {words}")
    case = save_case(Case(allocator=f"{own}:packed", input=SOUND), fake)
    assert run("replay", case).status == 2
    assert run("replay", case, "--allocator", f"{own}:packed").status == 0


def test_ctrl_c_ends_children_and_reports_what_was_done(tmp_path) -> None:
    command = fake_command(tmp_path)
    files = write_specs(tmp_path, "first", "hang", "last")
    script = (
        "from kvsan.ci.replay import supervisor; from kvsan.cli import main, replay_run\n"
        f"supervisor.COMMAND = {command!r}; replay_run.QUIET_SECONDS = 0\n"
        f"main(['replay', '--json', *{[str(file) for file in files]!r}])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "kvsan: 1 of 3 cases replayed: 1 clean\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "kvsan: interrupted\n")
    document = json.loads(out)
    assert document["interrupted"] is True
    assert [entry["digest"] for entry in document["cases"]] == ["digest of first"]
    assert children_of(tmp_path) == []


def test_children_end_with_a_parent_that_is_killed(tmp_path) -> None:
    command = fake_command(tmp_path)
    (file,) = write_specs(tmp_path, "hang")
    script = (
        f"from kvsan.ci.replay import supervisor; from kvsan.cli import main; supervisor.COMMAND = {command!r}\n"
        f"main(['replay', {str(file)!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not list((tmp_path / "pids").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert list((tmp_path / "pids").iterdir()) != []
    while children_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert children_of(tmp_path) == []


def children_of(folder: Path) -> list[int]:
    """Return the children that are still there; one that has ended may wait for somebody to ask how."""
    left = []
    for file in (folder / "pids").iterdir():
        try:
            state = Path(f"/proc/{file.name}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            continue
        left += [int(file.name)] if state != "Z" else []
    return left


@pytest.mark.parametrize("package", ["torch", "triton", "cupy"])
def test_what_is_not_installed_is_named_with_its_extra(run, tmp_path, monkeypatch, package) -> None:
    """The real child says it, in a Python that lacks the package."""
    (tmp_path / "lacking.py").write_text(
        "import importlib.util, sys\nfind = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *more: None if name == {package!r} else (\n"
        "    find(name, *more) or importlib.util.spec_from_loader(name, None) if name in ('torch', 'triton', 'cupy')\n"
        "    else find(name, *more))\n"
        "from kvsan.ci.replay.child import main\nmain(int(sys.argv[1]), int(sys.argv[2]))\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(supervisor, "COMMAND", (sys.executable, "-P", str(tmp_path / "lacking.py")))
    (file,) = write_specs(tmp_path, "sound")
    ran = run("replay", file, "--device", "cuda" if package == "cupy" else "cpu", "--json")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert f"kvsan: --device: {'cuda' if package == 'cupy' else 'cpu'} needs the package {package}" in ran.err
    assert f"pip install 'kvsan[{'gpu' if package == 'cupy' else 'kernels'}]'" in ran.err


BAD_OPTIONS = [
    (["--device", "tpu"], "--device: found 'tpu', needs one of cpu, cuda"),
    (["--workers", "0"], "--workers: found 0, needs a whole number from 1 to 256"),
    (["--workers", "two"], "--workers: found 'two', needs a whole number"),
    (["--workers", "9" * 5000], "--workers: found a number of 5000 characters"),
    (["--max-memory", "much"], "--max-memory: found 'much', needs bytes, such as 1048576, 512MiB or 4GiB"),
    (["--max-memory", "0"], "--max-memory: found 0, needs a whole number from 1"),
    (["--timeout", "-1"], "--timeout: found -1, needs a whole number from 1"),
    (["--timeout", ""], "--timeout: found '', needs a whole number"),
    (["--sanitizer"], "--sanitizer: found --device cpu, needs --device cuda"),
    (["--allocator", "trtllm-v3"], "--allocator: unknown allocator 'trtllm-v3'"),
    (["--allocator", "no_such_module:f"], "--allocator: cannot import 'no_such_module'"),
    (["--allocator", "os:system"], "--allocator: 'os:system' is part of Python's own library"),
    (["--slots", "-1"], "--slots: found -1"),
    (["--layout", "tq4"], "--layout: unknown parallel layout 'tq4'"),
    (["no such file"], "no such file"),
    ([""], "CASE_OR_DIR: found an empty path"),
    (["x\0y"], "x\\x00y: "),
    (["--no-such-option"], "No such option: --no-such-option"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_a_bad_option_is_one_line(run, fake, options, message) -> None:
    (file,) = write_specs(fake, "sound")
    ran = run("replay", file, *options, "--json")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"kvsan: {message}")
    assert ran.err.count("\n") == 1
    assert list((fake.parent / "pids").iterdir()) == [], "nothing was started"


def test_a_sanitizer_that_is_not_there_is_one_line(run, fake, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    (file,) = write_specs(fake, "sound")
    ran = run("replay", file, "--device", "cuda", "--sanitizer")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("kvsan: --sanitizer: compute-sanitizer is not on the path")


def test_an_empty_folder_is_bad_input(run, tmp_path) -> None:
    ran = run("replay", tmp_path)
    assert (ran.status, ran.out) == (2, "")
    assert "no case in this folder" in ran.err


def test_the_parent_imports_no_engine(tmp_path) -> None:
    command = fake_command(tmp_path)
    (file,) = write_specs(tmp_path, "sound")
    script = (
        "import sys; from kvsan.ci.replay import supervisor; from kvsan.cli import run\n"
        f"supervisor.COMMAND = {command!r}; status = run(['replay', {str(file)!r}])\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr); raise SystemExit(status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert {"cupy", "torch", "triton", "hypothesis", "islpy"}.intersection(done.stderr.split()) == set()
