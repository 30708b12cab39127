"""Saved cases: canonical, named by what they are, whole on disk or absent, and safe to read whoever wrote them."""

from __future__ import annotations

import functools
import itertools
import json
import os
import resource
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvsan.ci import cases
from kvsan.ci.cases import (
    MAX_CASE_BYTES,
    Case,
    FoundRule,
    add_case,
    case_allocator,
    case_files,
    decode_case,
    encode_case,
    load_case,
    require_folder,
    save_case,
    schema,
    withdraw_case,
)
from kvsan.model.errors import SpecError
from kvsan.model.layers import INDEX_KEY, LatentLayer, SidePlane, UncachedLayer
from kvsan.model.spec import AttentionLayer, CacheSpec, Draft, ParallelLayout
from kvsan.sim.rules import RULES

LAYER = AttentionLayer(kv_heads=2, head_dim=64)
SPEC = CacheSpec(layers=(LAYER,))
ALIAS = FoundRule(rule="alias", message="two bytes — one place")
BOUNDS = FoundRule(rule="bounds", message="past the end")
CASE = Case(allocator="trtllm-v2", input=SPEC, found=(ALIAS,))


def changed(**fields: Any) -> Case:
    return msgspec.structs.replace(CASE, **fields)


def document(**fields: Any) -> dict[str, Any]:
    """Return the JSON object of a case, some fields replaced; a value of None takes the field away."""
    found = json.loads(encode_case(CASE)) | fields
    return {key: value for key, value in found.items() if value is not None}


def text(**fields: Any) -> bytes:
    return json.dumps(document(**fields)).encode()


def refusal_of(action: Callable[[], object]) -> str:
    """Return the one line with which bad input is refused."""
    with pytest.raises(SpecError) as caught:
        action()
    found = str(caught.value)
    assert "\n" not in found
    assert len(found) < 700
    return found


# Canonical text and identity.

SPECS = [
    SPEC,
    CacheSpec(layers=(LAYER,), kv_format="fp8"),
    CacheSpec(layers=(LAYER, LAYER)),
    CacheSpec(layers=(LAYER,), slots=5),
    CacheSpec(layers=(LatentLayer(latent_dim=512),), model="a model — with a name"),
    CacheSpec(layers=(LAYER, UncachedLayer()), parallel=ParallelLayout(tp=2, pp=2), rank=3),
    CacheSpec(layers=(LAYER,), draft=Draft(mode="folded", layers=(LAYER,))),
    CacheSpec(
        layers=(
            AttentionLayer(
                kv_heads=2, head_dim=64, side_planes=(SidePlane(role=INDEX_KEY, dim=64, format=SPEC.kv_format),)
            ),
        )
    ),
]


def test_a_case_comes_back_equal_and_its_text_is_canonical() -> None:
    for spec in SPECS:
        case = Case(allocator="fault:canary", input=spec, found=(ALIAS, BOUNDS))
        written = encode_case(case)
        assert decode_case(written) == case
        assert encode_case(decode_case(written)) == written
        assert written.endswith(b"\n")
        assert written.count(b"\n") == 1
        keys = list(json.loads(written))
        assert keys == sorted(keys)


def test_equal_cases_are_equal_bytes_however_they_were_written() -> None:
    """Keys in another order, spaces, defaults left out, escapes: the same case."""
    spec = {"kvsan": "spec", "layers": [{"head_dim": 64, "kind": "attention", "kv_heads": 2}]}
    loose = {"found": [{"message": ALIAS.message, "rule": "alias"}], "input": spec, "version": 1}
    loose |= {"kvsan": "case", "allocator": "trtllm-v2"}
    for indent, ascii_only in itertools.product((None, 4), (True, False)):
        written = json.dumps(loose, indent=indent, ensure_ascii=ascii_only).encode()
        assert encode_case(decode_case(written)) == encode_case(CASE)


def test_the_name_depends_on_schema_allocator_and_input_alone() -> None:
    assert changed(found=()).digest == changed(found=(BOUNDS, ALIAS)).digest == CASE.digest
    others = [Case(allocator="trtllm-v2", input=spec) for spec in SPECS[1:]]
    others += [changed(allocator="trtllm-v1"), changed(version=2)]
    assert len({case.digest for case in [CASE, *others]}) == len(others) + 1
    assert CASE.file_name == f"{CASE.digest}.json"
    assert len(CASE.digest) == 32


def test_the_name_is_the_same_on_every_machine() -> None:
    """A changed digest renames every corpus: that takes a new version of the schema."""
    assert CASE.digest == "80c7a8d8474715f31c5f4f51051e1c28"


# Writing.


def test_a_saved_case_is_found_under_its_name(tmp_path: Path) -> None:
    path = save_case(CASE, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / CASE.file_name
    assert path.read_bytes() == encode_case(CASE)
    assert load_case(path) == CASE
    assert os.listdir(path.parent) == [path.name]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, "others may read it as any file of the user's"


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_on_the_way_leaves_nothing_behind(tmp_path, monkeypatch, step, error) -> None:
    (tmp_path / CASE.file_name).write_bytes(b"as it was")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cases.os, step, fail)
    if isinstance(error, OSError):
        assert "cannot save a case: No space left on device" in refusal_of(lambda: save_case(CASE, tmp_path))
    else:
        with pytest.raises(KeyboardInterrupt):
            save_case(CASE, tmp_path)
    assert os.listdir(tmp_path) == [CASE.file_name]
    assert (tmp_path / CASE.file_name).read_bytes() == b"as it was"


def test_readers_only_ever_see_whole_files(tmp_path: Path) -> None:
    rules = itertools.islice(itertools.cycle(rule.name for rule in RULES), 200)
    many = changed(found=tuple(FoundRule(rule=rule, message="x" * 1000) for rule in rules))
    save_case(many, tmp_path)
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            save_case(many, tmp_path)
            save_case(changed(found=()), tmp_path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {len(load_case(path).found) for _ in range(100) for path in case_files([tmp_path])}
    finally:
        ended.set()
        writer.join()
    assert seen <= {0, 200}


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert refusal_of(lambda: save_case(CASE, file)).startswith(f"{file}: cannot save a case: ")
    assert refusal_of(lambda: save_case(CASE, file / "below")).endswith("Not a directory")
    assert refusal_of(lambda: require_folder(file, "--cases")) == f"--cases: {file} is not a folder"
    assert refusal_of(lambda: require_folder(file / "below", "--cases")).startswith("--cases: ")
    long = tmp_path / ("x" * 300)
    assert "name too long" in refusal_of(lambda: require_folder(long, "--cases"))
    require_folder(tmp_path / "new" / "one", "--cases")
    assert not (tmp_path / "new").exists(), "asking makes no folder"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_without_the_right_to_write_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in refusal_of(lambda: save_case(CASE, tmp_path))
    assert "cannot be written" in refusal_of(lambda: require_folder(tmp_path / "new", "--cases"))


def test_a_folder_without_the_right_to_write_is_refused_before_the_work(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cases.os, "access", lambda *_: False)
    assert refusal_of(lambda: require_folder(tmp_path, "--cases")) == f"--cases: {tmp_path} cannot be written"


def test_rules_are_added_to_the_case_that_is_there(tmp_path: Path) -> None:
    path = add_case(changed(found=(BOUNDS,)), tmp_path)
    assert add_case(CASE, tmp_path) == path
    assert load_case(path).found == (ALIAS, BOUNDS)
    reworded = FoundRule(rule="alias", message="in other words")
    add_case(changed(found=(reworded,)), tmp_path)
    assert load_case(path).found == (ALIAS, BOUNDS)


def test_a_case_that_says_it_all_stays_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / CASE.file_name
    path.write_bytes(json.dumps(document(), indent=2).encode())
    before = path.read_bytes(), path.stat().st_ino
    add_case(CASE, tmp_path)
    add_case(changed(found=()), tmp_path)
    withdraw_case(path, "bounds")
    assert (path.read_bytes(), path.stat().st_ino) == before


@pytest.mark.skipif(sys.platform == "win32", reason="folders are not locked there")
def test_of_rules_added_at_once_none_is_lost(tmp_path: Path) -> None:
    """Campaigns, or parts of one under pytest-xdist, come to the same case by different rules."""
    rules = [rule.name for rule in RULES]
    for round_number in range(5):
        folder = tmp_path / str(round_number)
        begin = threading.Barrier(len(rules))

        def add(rule: str, folder: Path = folder, begin: threading.Barrier = begin) -> None:
            begin.wait()
            add_case(changed(found=(FoundRule(rule=rule, message="as it was"),)), folder)

        adding = [threading.Thread(target=add, args=(rule,)) for rule in rules]
        for thread in adding:
            thread.start()
        for thread in adding:
            thread.join()
        (path,) = folder.iterdir()
        assert {entry.rule for entry in load_case(path).found} == set(rules)
        dropping = [threading.Thread(target=withdraw_case, args=(path, rule)) for rule in rules[1:]]
        for thread in dropping:
            thread.start()
        for thread in dropping:
            thread.join()
        assert [entry.rule for entry in load_case(path).found] == rules[:1]


def test_a_file_that_is_no_case_gives_way(tmp_path: Path) -> None:
    other = tmp_path / CASE.file_name
    for content in (b"", b"{}", encode_case(changed(allocator="trtllm-v1"))):
        other.write_bytes(content)
        add_case(CASE, tmp_path)
        assert load_case(other) == CASE


def test_a_withdrawn_rule_takes_the_file_along_when_it_was_the_last(tmp_path: Path) -> None:
    path = save_case(changed(found=(ALIAS, BOUNDS)), tmp_path)
    withdraw_case(path, "alias")
    assert load_case(path).found == (BOUNDS,)
    withdraw_case(path, "bounds")
    withdraw_case(path, "bounds")
    assert os.listdir(tmp_path) == []


def test_folders_stand_for_their_cases_in_order(tmp_path: Path) -> None:
    for name in ("b.json", "a.json", ".case-1-2.tmp", "notes.txt"):
        (tmp_path / name).write_text("")
    lone = tmp_path / "notes.txt"
    assert list(case_files([lone, tmp_path])) == [lone, tmp_path / "a.json", tmp_path / "b.json"]


# Reading what anybody may have written.

BAD_TEXTS = {
    "nothing": (b"", "truncated"),
    "no JSON": (b"hello", "malformed"),
    "a list": (b"[]", 'needs a JSON object with "kvsan": "case"'),
    "a number": (b"3", "not a saved case"),
    "a spec": (b'{"kvsan":"spec"}', "not a saved case"),
    "a kind that is no text": (b'{"kvsan":["case"]}', "not a saved case"),
    "no kind": (text(kvsan=None), "not a saved case"),
    "truncated": (encode_case(CASE)[:-20], "truncated"),
    "cut in the middle": (encode_case(CASE)[: len(encode_case(CASE)) >> 1], ""),
    "more after the end": (encode_case(CASE) + b"{}", "malformed"),
    "version 0": (text(version=0), "version: found 0, needs a whole number from 1 to 1"),
    "version -1": (text(version=-1), "version: found -1"),
    "version 2": (text(version=2), "version: found 2, and this kvsan reads up to 1: use a newer one"),
    "version as text": (text(version="1"), "version: found '1'"),
    "version 1.0": (text(version=1.0), "version: found 1.0"),
    "version 1.5": (text(version=1.5), "version: found 1.5"),
    "version true": (text(version=True), "version: found True"),
    "no version": (text(version=None), "version: found None"),
    "a huge version": (text(version=0).replace(b'"version": 0', b'"version": ' + b"9" * 4000), "version"),
    "a version of 1e999": (text(version=0).replace(b'"version": 0', b'"version": 1e999'), ""),
    "an unknown field": (text(comment="hello"), "comment"),
    "an unknown field of the input": (text(input=document()["input"] | {"gpu": 1}), "gpu"),
    "an unknown field of a finding": (text(found=[{"rule": "a", "message": "b", "at": 1}]), "at"),
    "no allocator": (text(allocator=None), "allocator"),
    "an allocator that is no text": (text(allocator=3), "allocator"),
    "found that is no list": (text(found="alias"), "found"),
    "NaN": (text(input=document()["input"] | {"slots": float("nan")}), "malformed"),
    "infinity": (text(input=document()["input"] | {"slots": float("inf")}), "malformed"),
    "no UTF-8": (encode_case(CASE).replace(b"two bytes", b"two \xff\xfe"), ""),
    "a lone surrogate": (encode_case(CASE).replace(b"two bytes", b"\\ud800"), ""),
    "two byte order marks": (b"\xef\xbb\xbf" * 2 + encode_case(CASE), "malformed"),
    "a rule that nobody knows": (text(found=[{"rule": "no\nsuch", "message": ""}]), "found: unknown rule 'no\\nsuch'"),
    "deep lists": (b"[" * 200_000, "nested too deeply"),
    "deep objects": (b'{"a":' * 200_000, "nested too deeply"),
    "a deep field": (b'{"kvsan":"case","version":1,"input":' + b"[" * 200_000, "nested too deeply"),
    "layers without end": (text(input=document()["input"] | {"layers": 10**12}), "layers"),
    "a huge dim": (encode_case(CASE).replace(b'"head_dim":64', b'"head_dim":1000000000000'), "head_dim"),
    "a dim of 5,000 digits": (encode_case(CASE).replace(b'"head_dim":64', b'"head_dim":' + b"7" * 5000), ""),
    "huge slots": (encode_case(CASE).replace(b'"slots":4', b'"slots":9007199254740993'), "slots"),
    "a huge tp": (encode_case(CASE).replace(b'"tp":1', b'"tp":1000000'), "tp"),
    "20,000 layers": (
        text(input=document()["input"] | {"layers": document()["input"]["layers"] * 20_000}),
        "layers: found 20000, needs 1 to 10000 layers",
    ),
    "tp times pp times cp": (
        text(input=document()["input"] | {"parallel": {"tp": 16384, "pp": 16384, "cp": 16384}}),
        "",
    ),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_bad_text_is_refused_in_one_line_and_at_once(tmp_path: Path, name: str) -> None:
    content, words = BAD_TEXTS[name]
    path = tmp_path / "case.json"
    path.write_bytes(content)
    started = time.process_time()
    found = refusal_of(lambda: load_case(path))
    assert time.process_time() - started < 2
    assert found.startswith(f"{path}: ")
    assert words in found


def test_a_byte_order_mark_is_no_part_of_a_case(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_bytes(b"\xef\xbb\xbf" + encode_case(CASE))
    assert load_case(path) == CASE


def test_a_rule_of_a_newer_kvsan_is_kept_in_the_file(tmp_path: Path) -> None:
    """What adds to a case or takes a rule from it keeps the others, known or not."""
    newer = changed(found=(FoundRule(rule="of-next-year", message=""),))
    path = save_case(newer, tmp_path)
    add_case(changed(found=(ALIAS,)), tmp_path)
    assert {entry.rule for entry in decode_case(path.read_bytes()).found} == {"alias", "of-next-year"}
    withdraw_case(path, "alias")
    assert decode_case(path.read_bytes()) == newer


def test_every_cut_of_a_case_is_refused(tmp_path: Path) -> None:
    written = encode_case(CASE)
    for length in range(len(written) - 1):
        refusal_of(functools.partial(decode_case, written[:length]))
    assert decode_case(written[:-1]) == CASE, "only the newline at the end is not needed"


def test_no_single_changed_byte_is_worse_than_one_line() -> None:
    written = encode_case(CASE)
    for place, byte in itertools.product(range(0, len(written), 7), (0, 34, 45, 57, 91, 123, 200)):
        mutated = written[:place] + bytes([byte]) + written[place + 1 :]
        try:
            decode_case(mutated)
        except SpecError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "not a file, needs a saved case"),
        (lambda path: os.mkfifo(path), "not a file, needs a saved case"),
        (lambda path: path.symlink_to(path), "symbolic link"),
        (lambda path: path.symlink_to("/dev/zero"), "not a file, needs a saved case"),
    ],
    ids=["missing", "a folder", "a FIFO", "a circle of links", "a device"],
)
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, make: Any, words: str) -> None:
    path = tmp_path / "case.json"
    make(path)
    assert words in refusal_of(lambda: load_case(path))


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert f"needs at most {MAX_CASE_BYTES} B" in refusal_of(lambda: load_case(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_file_that_grows_after_the_question_is_not_read_to_its_end(tmp_path, monkeypatch) -> None:
    path = tmp_path / "case.json"
    with path.open("wb") as file:
        file.truncate(MAX_CASE_BYTES + 100)
    small = tmp_path / "small"
    small.write_bytes(b"")
    monkeypatch.setattr(Path, "stat", lambda self, **_: os.stat(small))
    assert f"needs at most {MAX_CASE_BYTES} B" in refusal_of(lambda: load_case(path))


# Versions.


@pytest.fixture
def today_is_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant two migrations: version 1 called the allocator ``engine``, version 2 said ``rules`` in one text."""

    def engine_is_allocator(case: dict[str, Any]) -> dict[str, Any]:
        case["allocator"] = case.pop("engine")
        return case

    def rules_are_found(case: dict[str, Any]) -> dict[str, Any]:
        case["found"] = [{"rule": rule, "message": ""} for rule in case.pop("rules").split()]
        return case

    monkeypatch.setattr(cases, "CASE_VERSION", 3)
    monkeypatch.setattr(cases, "_MIGRATIONS", {1: engine_is_allocator, 2: rules_are_found})


@pytest.mark.usefixtures("today_is_three")
def test_older_versions_are_migrated_step_by_step() -> None:
    found = (FoundRule(rule="alias", message=""), FoundRule(rule="bounds", message=""))
    wanted = Case(version=3, allocator="trtllm-v2", input=SPEC, found=found)
    old = document(allocator=None, found=None, engine="trtllm-v2", rules="alias bounds")
    assert decode_case(json.dumps(old).encode()) == wanted
    middle = document(version=2, found=None, rules="alias bounds")
    assert decode_case(json.dumps(middle).encode()) == wanted
    assert decode_case(encode_case(wanted)) == wanted
    assert refusal_of(lambda: decode_case(text(version=4))).startswith("version: found 4, and this kvsan reads up to 3")


@pytest.mark.usefixtures("today_is_three")
@pytest.mark.parametrize(
    "hostile",
    [
        text(),  # no engine
        text(allocator=None, engine="trtllm-v2", rules=3, found=None),
        text(allocator=None, engine="trtllm-v2", rules={"a": 1}, found=None),
        text(version=2, rules="alias", found=None, comment=1),
        text(version=2, rules="alias", found=None, input=7),
        text(version=2, rules="alias", found=None, input={"layers": [{"kind": "attention", "kv_heads": 10**15}]}),
    ],
)
def test_what_cannot_be_migrated_is_bad_input_and_no_bug(hostile: bytes) -> None:
    refusal_of(lambda: decode_case(hostile))


def test_a_version_that_nobody_migrates_any_more_is_named(monkeypatch) -> None:
    monkeypatch.setattr(cases, "CASE_VERSION", 3)
    monkeypatch.setattr(cases, "_MIGRATIONS", {2: lambda case: case})
    found = refusal_of(lambda: decode_case(text(version=1)))
    assert found == "version: found 1, and this kvsan reads no version before 2"


# Whose code runs.


@pytest.mark.parametrize("name", ["os:system", "engine.cache:allocate", ":", "a:b:c", "Fault:canary", "kvsan.cli:main"])
def test_a_case_never_names_code_by_itself(name: str) -> None:
    found = refusal_of(lambda: case_allocator(changed(allocator=name), None))
    assert "code is never loaded because a file says so" in found
    assert case_allocator(changed(allocator=name), name) == name


def test_shipped_names_need_no_permission() -> None:
    for name in ("trtllm-v1", "fault:canary", "fault:no-such", "plugin-name"):
        assert case_allocator(changed(allocator=name), None) == name
        assert case_allocator(changed(allocator=name), "trtllm-v2") == "trtllm-v2"


# The published schema.


def test_the_published_schema_is_that_of_the_code(root: Path) -> None:
    """Mend it with ``python -m kvsan.ci.cases > docs/case.schema.json``."""
    published = (root / "docs" / "case.schema.json").read_text(encoding="utf-8")
    assert json.loads(published) == json.loads(schema())


def test_the_schema_names_every_field_of_a_case() -> None:
    found = json.loads(schema())
    assert found["$ref"] == "#/$defs/Case"
    assert set(found["$defs"]["Case"]["properties"]) == {"kvsan", *Case.__struct_fields__}
    assert found["$defs"]["Case"]["additionalProperties"] is False
    assert set(found["$defs"]["CacheSpec"]["properties"]) == {"kvsan", *CacheSpec.__struct_fields__}
