"""Bad input and bad usage: exit status 2, one line on the standard error that names the culprit, nothing else."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvsan.cli import main

BAD_OPTIONS = [
    (["--tp", "abc"], "--tp: found 'abc', needs a whole number"),
    (["--tp", "1.5"], "--tp: found '1.5', needs a whole number"),
    (["--tp", ""], "--tp: found '', needs a whole number"),
    (["--tp", "٣"], "--tp: found '٣', needs a whole number"),
    (["--tp", "99999999999999999999"], "--tp: found 99999999999999999999, needs a whole number from 1 to 16384"),
    (["--tp", "9" * 5000], "--tp: found a number of 5000 characters"),
    (["--tp", "0"], "--tp: found 0, needs a whole number from 1"),
    (["--pp", "100"], "--pp: found 100 pipeline stages for 48 layers"),
    (["--layout", "tp2pp100"], "--layout: 'tp2pp100': pp: found 100 pipeline stages for 48 layers"),
    (["--layout", ""], "--layout: unknown parallel layout '', needs a name such as tp4"),
    (["--layout", "tq4"], "--layout: unknown parallel layout 'tq4'"),
    (["--layout", "tp2\n\x1b[31mred"], "--layout: unknown parallel layout"),
    (["--pp-partition", "1,x"], "--pp-partition: found 'x', needs whole numbers with commas between"),
    (["--pp-partition", "1,,2"], "--pp-partition: found '', needs whole numbers"),
    (["--pp-partition", "40,40"], "--pp-partition: found 80 layers in all, needs at most the model's 48"),
    (["--pp", "3", "--pp-partition", "40,8"], "--pp-partition: found 2 entries, needs one for each of 3 stages"),
    (["--ep", "3", "--tp", "4"], "--ep: found 3, needs a divisor of the tensor-parallel size 4"),
    (["--cp", "-1"], "--cp: found -1, needs a whole number"),
    (["--tp", "4", "--rank", "7"], "--rank: found 7, needs a whole number from 0 to 3"),
    (["--rank", "-1"], "--rank: found -1, needs a whole number from 0 to 0"),
    (["--layout", "tp4096pp40", "--all-ranks"], "--all-ranks: found 163840 ranks, needs at most 4096"),
    (["--kv-dtype", "int32"], "--kv-dtype: found 'int32', needs one of fp32, fp16, bf16, fp8"),
    (["--kv-dtype", "fp9"], "--kv-dtype: found 'fp9', needs one of fp32, fp16, bf16, fp8"),
    (["--state-dtype", "nvfp4"], "--state-dtype: found 'nvfp4', needs one of fp32, fp16, bf16"),
    (["--tokens-per-block", "0"], "--tokens-per-block: found 0, needs a whole number from 1 to 65536"),
    (["--slots", "-1"], "--slots: found -1, needs a whole number from 1"),
    (["--state-slots", "0"], "--state-slots: found 0, needs a whole number from 1"),
    (["--quota", "4XB"], "--quota: found '4XB', needs bytes, such as 1048576, 512MiB or 4GiB"),
    (["--quota", "-4GiB"], "--quota: found -4294967296, needs a whole number from 1"),
    (["--quota", "9999999TiB"], "--quota: found 10995115178248372224, needs a whole number from 1"),
    (["--draft", "some"], "--draft: found 'some', needs one of none, folded, separate"),
    (["--kv-layout", "DNH"], "--kv-layout: found 'DNH', needs one of HND, NHD"),
    (["--alignment", "3"], "--alignment: found 3, needs a power of two"),
    (["--allocator", "trtllm-v3"], "--allocator: unknown allocator 'trtllm-v3', needs one of trtllm-v1"),
    (["--allocator", "fault:none"], "--allocator: unknown allocator 'fault:none'"),
    (["--allocator", "no_such_module_here:f"], "--allocator: cannot import 'no_such_module_here'"),
    (["--allocator", ":"], "--allocator: cannot import ''"),
    (["--no-such-option"], "No such option: --no-such-option"),
    (["one-more"], "Got unexpected extra argument"),
    (["--tp"], "Option '--tp' requires an argument"),
]

CONTRADICTIONS = [
    ("--layout=tp2", "--tp=2"),
    ("--layout=", "--tp=2"),
    ("--layout=tp2", "--pp=2"),
    ("--layout=tp2", "--ep=2"),
    ("--layout=tp2", "--cp=2"),
    ("--layout=tp2", "--attention-dp"),
    ("--rank=0", "--all-ranks"),
    ("--slots=4", "--quota=4GiB"),
    ("--state-slots=4", "--quota=4GiB"),
]

BAD_FILES = [
    ("not json", "not JSON"),
    ('{"num_hidden_layers": ', "not JSON"),
    ("[1, 2]", "a list at the top level, needs a JSON object"),
    ("{}", "num_hidden_layers"),
    ("", "not JSON"),
    ('{"model_type": "llama", "num_hidden_layers": NaN}', "num_hidden_layers: found NaN"),
    (
        '{"model_type": "llama", "num_hidden_layers": 1000000000000, "hidden_size": 8, "num_attention_heads": 1}',
        "layers",
    ),
    ('{"kvsan": 3}', "found kvsan: 3, needs a model's config.json or a saved spec"),
    ('{"kvsan": "spec", "layers": 3}', "$.layers"),
    ('{"kvsan": "spec", "layers": []}', "layers: found 0, needs 1 to 10000 layers"),
]


def require_one_line(ran, *words: str) -> None:
    """Assert that a run failed as bad input must."""
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("kvsan: ")
    assert ran.err.endswith("\n")
    assert ran.err.count("\n") == 1
    assert ran.err.rstrip("\n").isprintable()
    for word in words:
        assert word in ran.err


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_a_bad_option_is_named(run, reference, options, message) -> None:
    ran = run("check", reference, *options)
    require_one_line(ran)
    assert ran.err.startswith(f"kvsan: {message}")


@pytest.mark.parametrize(("one", "other"), CONTRADICTIONS)
def test_contradictions_are_refused_pair_by_pair(run, reference, one, other) -> None:
    names = [option.partition("=")[0] for option in (one, other)]
    require_one_line(run("check", reference, one, other), f"{names[0]} and {names[1]} were both given, but")


@pytest.mark.parametrize(("text", "words"), BAD_FILES, ids=lambda value: value[:30])
def test_a_bad_file_is_named(run, tmp_path, text, words) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    require_one_line(run("check", file, "--json"), "config.json", words)
    require_one_line(run("matrix", file, "--json"), "config.json", words)


def test_a_file_that_cannot_be_read_is_named(run, tmp_path) -> None:
    require_one_line(run("check", tmp_path / "absent.json"), "absent.json", "no such file")
    require_one_line(run("check", tmp_path), tmp_path.name, "without a config.json")
    require_one_line(run("check", ""), "CONFIG: found an empty path")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    require_one_line(run("check", binary), "binary.json", "not UTF-8")
    require_one_line(run("check", Path("/dev/null")), "null")


MARK = b"\xef\xbb\xbf"
"""The byte order mark that some editors write in front of UTF-8."""


def test_a_byte_order_mark_is_no_part_of_a_file(run, tmp_path, reference) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(MARK + reference.read_bytes())
    assert run("check", file, "--json").out == run("check", reference, "--json").out
    file.write_bytes(MARK + b'{"kvsan": "spec", "layers": [{"kind": "attention", "kv_heads": 1, "head_dim": 64}]}')
    assert run("check", file).status == 0
    file.write_bytes(MARK + b'{"kvsan": "map"}')
    require_one_line(run("check", file), "config.json: found a kvsan map, needs a model's config.json")
    file.write_bytes(MARK + b'{"kv_formats": ["fp8"], "heads": 1, "head_dims": [8], "tp": [1], "index_dims": [8]}')
    assert run("sweep", "--allocator", "trtllm-v2-qsa-packed", "--grid", file).status == 0


ODD_NAMES = ["two\nlines.json", "two  spaces.json", "\x1b[31mred.json", "l\udcffone.json", "[b]old.json", "n" * 200]


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
@pytest.mark.parametrize("content", [None, b"not json", b'{"kvsan": "spec", "layers": []}', b'{"kvsan": "case"}'])
def test_a_path_is_shown_once_and_alike_everywhere(run, tmp_path, name, content, monkeypatch) -> None:
    """In whatever way it is given: printable, and as every other message shows it."""
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    shown = name if len(name) <= 120 else "..." + name[-117:]
    shown = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in shown)
    commands = (["check", name], ["check", f".//{name}"], ["matrix", name], ["check", name, "--all-ranks"])
    for command in (*commands, ["shrink", name], ["shrink", f"./{name}"]):
        layouts = ["--layouts", "tp1"] if command[0] == "matrix" else []
        ran = run(*command, *layouts)
        require_one_line(ran)
        assert ran.err.startswith(f"kvsan: {shown}: ")
        assert ran.err.count(shown) == 1


def test_a_fault_of_a_saved_spec_is_not_blamed_on_an_option(run, tmp_path, reference) -> None:
    saved = tmp_path / "saved.json"
    spec = run("check", reference, "--tp", 4, "--rank", 3, "--json").out
    saved.write_text(spec[spec.index('"spec":') + 7 : spec.index(',"pools"')], encoding="utf-8")
    assert run("check", saved).status == 0
    require_one_line(run("check", saved, "--tp", 2), "saved.json: rank: found 3, needs a whole number from 0 to 1")
    require_one_line(run("check", saved, "--draft", "folded"), "--draft: found no layer with mode folded")


def test_missing_and_unknown_commands(run) -> None:
    require_one_line(run("check"), "Missing argument 'CONFIG'", "kvsan check --help")
    require_one_line(run("chek", "x"), "No such command 'chek'", "kvsan --help")
    require_one_line(run("rules", "x", "y"), "unexpected extra argument", "kvsan rules --help")


def test_an_error_of_the_system_is_not_called_one_of_ours(run, reference, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("kvsan.cli.check_run.document_of", fail)
    ran = run("check", reference, "--json")
    require_one_line(ran, "the system refuses", "Too many open files")
    assert "report" not in ran.err


def test_an_unexpected_error_is_one_line_too(run, reference, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("planted\nfault")

    monkeypatch.setattr("kvsan.cli.check_run.document_of", fail)
    require_one_line(run("check", reference, "--json"), "internal error", "ZeroDivisionError: planted fault")
    monkeypatch.setenv("KVSAN_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError, match="planted"):
        main(["check", str(reference), "--json"])
