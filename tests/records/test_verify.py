"""Deletion records: each byte counts, and the chain shows what is missing or was replaced."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfu.errors import ArtifactError
from sfu.records.chain import verify
from sfu.records.record import DeletionRecord, as_text, hash_of, read_deletion_record
from tests.records.cases import everything, message_of, run, write_head, write_rows


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder of a head that has served three requests."""
    folder = tmp_path_factory.mktemp("served")
    new, rows = folder / "new", [write_rows(folder / f"{n}.npz", 5 * n, 5 * n + 5) for n in range(3)]
    assert run(write_head(folder), rows[0], "--out", str(new), "--apply") == 0
    for more in rows[1:]:
        assert run(str(new), more, "--in-place", "--apply") == 0
    return new


@pytest.fixture
def folder(served, tmp_path):
    """A copy of it that a test may spoil."""
    shutil.copytree(served, tmp_path / "new")
    return tmp_path / "new"


def resealed(path: Path, **changes: object) -> None:
    """Change a record and give it the right hash, as somebody who knows sfu can."""
    content = json.loads(path.read_text()) | changes
    path.write_text(as_text(content | {"hash": hash_of(content)}))


def test_a_chain_is_verified_and_its_last_hash_printed(served, capsys):
    last = read_deletion_record(served / "record-3.json").hash
    for records in ([served], sorted(served.glob("record-*.json")), [served, served / "record-1.json"]):
        assert run("verify", *map(str, records)) == 0
        shown = capsys.readouterr().out
        assert re.findall(r"^record (\d)  \S+Z  5 rows, applied", shown, re.M) == ["1", "2", "3"]
        assert f"Verified. The last hash is\n{last}\n" in shown
        assert "Keep this hash where nobody can change it." in shown
        assert max(map(len, shown.splitlines())) <= 80
    assert run("verify", str(served), "--expect", last) == 0
    assert "Keep this hash" not in capsys.readouterr().out


@settings(max_examples=200)
@given(st.data())
def test_one_byte_that_is_changed_is_detected(served, tmp_path_factory, data):
    body = (served / "record-2.json").read_bytes()
    place = data.draw(st.integers(0, len(body) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != body[place]))
    path = tmp_path_factory.mktemp("bytes") / "record-2.json"
    path.write_bytes(body[:place] + bytes([byte]) + body[place + 1 :])
    with pytest.raises(ArtifactError, match=re.escape(str(path))):
        read_deletion_record(path)


def test_spaces_and_the_order_of_keys_count(folder):
    path = folder / "record-1.json"
    content = json.loads(path.read_text())
    for text in (json.dumps(content), as_text(content) + "\n", as_text(content).replace('": ', '":  ', 1)):
        path.write_text(text)
        with pytest.raises(ArtifactError, match="was altered: it is not laid out as sfu writes records"):
            read_deletion_record(path)
    path.write_text(as_text(content).replace('"number": 1', '"number": 1,\n  "number": 1'))
    with pytest.raises(ArtifactError, match="laid out"):
        read_deletion_record(path)


digests, hex_rows = (st.text("0123456789abcdef", min_size=n, max_size=n) for n in (64, 32))
finite = st.floats(allow_nan=False, allow_infinity=False)
sizes = st.floats(0, 1e300)
files = st.fixed_dictionaries({key: st.none() | digests for key in ("tensors", "settings", "secret", "model")})
counts, words = st.integers(0, 2**63 - 1), st.text(max_size=20)
removed = st.fixed_dictionaries({"made_of_them": counts, "unknown": counts})
asked = st.fixed_dictionaries({
    "kind": words, "files": st.integers(1, 9), "rows": counts, "unlabelled": st.lists(counts, max_size=3),
    "seed": counts, "copies": st.booleans(), "on_doubt": st.sampled_from(["withhold", "apply"]),
})  # fmt: skip
done = st.fixed_dictionaries({
    "verdict": st.sampled_from(["applied", "applied_with_reservations"]), "reasons": st.lists(words, max_size=3),
    "method": words, "note": st.none() | words, "rows": counts, "row_digests": st.lists(hex_rows, max_size=3),
    "n_train": st.lists(counts, min_size=2, max_size=2), "earlier_requests": counts, "kept": st.booleans(),
    "rounded": st.none() | sizes,
})  # fmt: skip
estimated = st.fixed_dictionaries({
    "share": st.none() | st.floats(-1, 1), "share_interval": st.none() | st.lists(finite, min_size=2, max_size=2),
    "distance": st.none() | sizes, "l2": sizes, "l2_interval": st.none(),
})  # fmt: skip
purged = st.fixed_dictionaries({
    "rows": counts, "caches": st.dictionaries(words, removed, max_size=2), "runs": removed,
    "kept_head": st.booleans(), "ledger": st.booleans(),
})  # fmt: skip
NOTHING = dict.fromkeys(("asked", "done", "estimated", "undone", "purged"))
events = st.one_of(
    st.fixed_dictionaries({"event": st.just("request"), "asked": asked, "done": done, "estimated": estimated}),
    st.fixed_dictionaries({"event": st.just("undo"), "undone": counts}),
    st.fixed_dictionaries({"event": st.just("purge"), "purged": purged}),
)
records = st.builds(lambda common, event: NOTHING | common | event, st.fixed_dictionaries({
    "schema": st.just(1), "number": st.integers(1, 10**6), "previous": st.none() | digests,
    "time": st.datetimes().map(lambda time: f"{time.year:04}-{time:%m-%dT%H:%M:%S}Z"), "sfu": words, "torch": words,
    "before": files, "after": files, "layer": st.none() | words, "not_touched": st.lists(words, max_size=3),
    "text": digests,
}), events)  # fmt: skip


@given(records)
def test_a_record_is_read_as_it_was_written(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("record") / "record.json"
    content = {**content, "hash": hash_of(content)}
    path.write_text(as_text(content))
    record = read_deletion_record(path)
    assert record.model_dump(mode="json", by_alias=True) == content
    assert hash_of(record.model_dump(mode="json", by_alias=True)) == record.hash
    assert isinstance(record, DeletionRecord)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, r"has schema 2, but this sfu reads schema 1\. Use a newer sfu\."),
        ({"number": 0}, r"number=0"),
        ({"time": "yesterday"}, r"time='yesterday'"),
        ({"text": "ABC"}, r"text='ABC'"),
        ({"names": ["Ada"]}, r"names=\['Ada'\]: Extra inputs"),
        ({"done": {"verdict": "withheld"}}, r"done\.verdict='withheld'"),
    ],
)
def test_a_record_that_is_none_is_refused_although_its_hash_is_right(folder, changes, message):
    resealed(folder / "record-1.json", **changes)
    with pytest.raises(ArtifactError, match=message):
        read_deletion_record(folder / "record-1.json")


def _altered(folder: Path) -> None:
    path = folder / "record-2.json"
    path.write_text(path.read_text().replace('"rows": 5', '"rows": 4', 1))


def _reordered(folder: Path) -> None:
    first, second = (json.loads((folder / f"record-{n}.json").read_text())["number"] for n in (2, 3))
    resealed(folder / "record-2.json", number=second)
    resealed(folder / "record-3.json", number=first)


PROBLEMS = {
    "an altered record": (_altered, r"record-2\.json was altered: the SHA-256"),
    "a replaced record": (lambda folder: resealed(folder / "record-1.json", sfu="9"), r"2\.json does not follow"),
    "a missing record": (lambda folder: (folder / "record-2.json").unlink(), r"1 records? (is|are) missing"),
    "a missing first": (lambda folder: (folder / "record-1.json").unlink(), r"record 1 is missing\. Give all records"),
    "a missing last": (lambda folder: (folder / "record-3.json").unlink(), r"the tensors .* not that of record 2"),
    "another order": (_reordered, r"does not follow"),
    "a first that is none": (
        lambda folder: resealed(folder / "record-1.json", previous="0" * 64), r"1, but names a record before it"
    ),
    "another text": (lambda folder: (folder / "record-1.md").write_text("Fine."), r"record-1\.md is not the text"),
    "another head": (lambda folder: (folder / "head.safetensors").write_bytes(b""), r"the tensors of the head"),
    "a model from nowhere": (lambda folder: (folder / "model.pt").write_bytes(b""), r"the model of the head"),
    "other files between": (
        lambda folder: resealed(
            folder / "record-3.json", before=json.loads((folder / "record-1.json").read_text())["before"]
        ),
        r"record-3\.json was made from other files",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PROBLEMS)
def test_problems_are_found_and_exit_with_1(folder, capsys, case):
    spoil, message = PROBLEMS[case]
    spoil(folder)
    assert run("verify", str(folder)) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(message, shown), shown
    assert re.search(r"Not verified: \d problems?\.$", shown)


def test_a_tail_that_was_cut_off_shows_against_the_hash_that_was_kept(served, folder, capsys):
    first = [str(served / f"record-{number}.json") for number in (1, 2)]
    for path in ("record-3.json", "record-3.md", "head.json", "head.safetensors", "head.secret"):
        (folder / path).unlink()
    kept = read_deletion_record(served / "record-3.json").hash
    assert run("verify", str(folder)) == 0
    assert run("verify", str(folder), "--expect", kept) == 1
    assert f"but {kept} is expected. A later record is missing" in " ".join(capsys.readouterr().out.split())
    assert verify([Path(path) for path in first], kept).problems


def test_a_head_without_its_secret_is_verified_as_far_as_it_goes(folder, capsys):
    (folder / "head.secret").unlink()
    assert run("verify", str(folder)) == 0
    assert "The secret of the head is not in" in capsys.readouterr().out


def test_two_branches_of_a_chain_are_told(served, tmp_path, capsys):
    more, other = write_rows(tmp_path / "more.npz", 100, 105), write_rows(tmp_path / "other.npz", 105, 110)
    for rows, name in ((more, "a"), (other, "b")):
        assert run(str(served), rows, "--out", str(tmp_path / name), "--apply") == 0
    capsys.readouterr()
    assert run("verify", str(tmp_path / "a"), str(tmp_path / "b" / "record-4.json")) == 1
    assert "are both record 4" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.json"], r"none\.json does not exist\. Give a record or a folder"),
        (["."], r"\. holds no record-1\.json"),
        ([], r"required: RECORD"),
        (["x.json", "--expect", "abc"], r"'abc' is no hash\. Give the 64 hexadecimal digits"),
    ],
)
def test_wrong_use_exits_with_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert run("verify", *arguments) == 2
    assert re.search(message, message_of(capsys))


def test_files_that_are_no_records_exit_with_1(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").write_bytes(b"\xff\x00")
    assert run("verify", str(tmp_path / "a.json"), str(tmp_path / "b.json")) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("cannot be read") == 2
    assert "Not verified: 2 problems." in shown
    assert set(everything(tmp_path)) == {"a.json", "b.json"}
