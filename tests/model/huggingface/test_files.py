"""Files that are no config: each is one line that names the file, never another exception, never a wait."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from kvsan.model.errors import SpecError
from kvsan.model.huggingface import read_architecture
from kvsan.model.huggingface.reading import MAX_FILE_BYTES


def refusal(source: Any) -> str:
    with pytest.raises(SpecError) as caught:
        read_architecture(source)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.isprintable()
    assert len(message) < 500
    return message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"   \n", "not JSON"),
        (b"model_type: llama", "not JSON"),
        (b'{"model_type": "llama", "num_hidden_la', "not JSON"),
        (b'{"a": 1} {"b": 2}', "not JSON"),
        (b'\xef\xbb\xbf\xef\xbb\xbf{"a": 1}', "not JSON"),
        (b'\xef\xbb\xbf{"num_hidden_layers": NaN}', "num_hidden_layers: found NaN"),
        (b"\xff\xfe\x00{", "not UTF-8 text (byte 0)"),
        ('{"a": "\u00e9"}'.encode("latin-1"), "not UTF-8 text (byte 7)"),
        (bytes(range(256)), "not UTF-8 text"),
        (b"\x7fELF" + bytes(100), "not JSON"),
        (b"null", "found null at the top level, needs a JSON object"),
        (b"[]", "found a list at the top level"),
        (b'"llama"', "found a string at the top level"),
        (b"42", "found a number at the top level"),
        (b"true", "found a boolean at the top level"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"[" * 100_000 + b"NaN" + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"num_hidden_layers": NaN}', "num_hidden_layers: found NaN, needs a finite number"),
        (b'{"a": {"b": [1, -Infinity]}}', "a.b: found -Infinity, needs a finite number"),
        (b'{"time_step_limit": [0.0, NaN]}', "time_step_limit: found NaN"),
        (b'{"rope_theta": Infinity}', "rope_theta: found Infinity"),
        (b"NaN", "found NaN"),
        (b'{"NaN": oops}', "not JSON"),
        (b'{"num_hidden_layers": 1' + b"0" * 5000 + b"}", "not JSON"),
        (b'{"model_type": "llama", "num_hidden_layers": 1e999}', ""),
        (b"{}", "num_hidden_layers, num_attention_heads, head_dim or hidden_size: missing"),
        (b'{"num_hidden_layers": 2, "num_attention_heads": "4", "head_dim": 8}', "num_attention_heads: found '4'"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_bad_content(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    message = refusal(path)
    assert words in message
    assert "config.json" in message
    assert refusal(str(tmp_path)) == message  # the folder says the same


def test_the_infinity_of_published_configs_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = (
        '{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,'
        ' "time_step_limit": [0.0, Infinity]}'
    )
    path.write_text(config, "utf-8")
    assert len(read_architecture(path).layers) == 2
    path.write_text(config.replace("time_step_limit", "time_step"), "utf-8")
    assert "time_step: found Infinity, needs a finite number" in refusal(path)


def test_missing_files(tmp_path: Path) -> None:
    assert "no such file or directory" in refusal(tmp_path / "nowhere" / "config.json")
    assert "a folder without a config.json" in refusal(tmp_path)
    (tmp_path / "config.json").mkdir()
    assert "not a plain file" in refusal(tmp_path)
    (tmp_path / "config.json" / "inner").write_text("{}", "utf-8")
    assert "not a directory" in refusal(tmp_path / "config.json" / "inner" / "deeper")


@pytest.mark.parametrize("source", [None, 3, 3.5, b"config.json", [], object(), ""])
def test_sources_of_another_kind(source: object) -> None:
    assert refusal(source).startswith("source: found")


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "x" * 5000, "a\nb", "\x1b[31m", "dir/" * 2000], ids=range(6))
def test_odd_paths(path: str) -> None:
    assert "needs" in refusal(path)


class OddPath(os.PathLike[Any]):
    """A path object that answers with something odd."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __fspath__(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_path_objects(root: Path) -> None:
    example = root / "examples" / "qwen3.8-flash-next"
    assert len(read_architecture(OddPath(os.fsencode(example))).layers) == 48
    assert "source" in refusal(OddPath(3))
    assert "source" in refusal(OddPath(RuntimeError("no")))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "not a plain file" in refusal(tmp_path / "config.json")
    assert "not a plain file" in refusal(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_file_that_became_a_fifo_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fifo = tmp_path / "plain", tmp_path / "config.json"
    plain.write_text("{}", "utf-8")
    os.mkfifo(fifo)
    status, opened = os.stat(plain), os.open

    def never_waiting(path: str, flags: int) -> int:
        assert flags & os.O_NONBLOCK
        return opened(path, flags)

    monkeypatch.setattr("kvsan.model.huggingface.reading.os.stat", lambda path: status)
    monkeypatch.setattr("kvsan.model.huggingface.reading.os.open", never_waiting)
    with pytest.raises(SpecError, match="not a plain file"):
        read_architecture(str(fifo))


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs /dev/zero")
def test_an_endless_file_is_not_read() -> None:
    assert "not a plain file" in refusal("/dev/zero")


@pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links")
def test_links(tmp_path: Path, configs: Path) -> None:
    link = tmp_path / "config.json"
    link.symlink_to(configs / "llama-3.1-8b.json")
    assert len(read_architecture(tmp_path).layers) == 32
    link.unlink()
    link.symlink_to(link)
    assert "cannot be read" in refusal(tmp_path)
    link.unlink()
    link.symlink_to(tmp_path / "gone")
    assert "no such file" in refusal(tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path: Path, configs: Path) -> None:
    path = tmp_path / "config.json"
    shutil.copyfile(configs / "llama-3.1-8b.json", path)
    path.chmod(0)
    assert "permission denied" in refusal(path)


def test_a_permission_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}", "utf-8")

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kvsan.model.huggingface.reading.os.open", denied)
    assert "cannot be read (permission denied)" in refusal(path)


def test_a_huge_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)  # sparse: no disk is used
    assert f"found {MAX_FILE_BYTES + 1} bytes or more" in refusal(path)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert f"found {1 << 40} bytes or more" in refusal(path)


def test_a_file_that_grew_is_refused_while_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}" + " " * 100, "utf-8")
    monkeypatch.setattr("kvsan.model.huggingface.reading.MAX_FILE_BYTES", 50)
    monkeypatch.setattr("kvsan.model.huggingface.reading._require_plain", lambda status, name: None)
    assert "found 51 bytes or more" in refusal(path)


def test_errors_of_fields_name_the_field_and_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"num_hidden_layers": 0, "num_attention_heads": 4, "head_dim": 8}', "utf-8")
    with pytest.raises(SpecError) as caught:
        read_architecture(path)
    assert caught.value.field == "num_hidden_layers"
    assert str(caught.value).endswith("config.json)")
