"""The store behind every cache: entries that are complete or absent, locked, verified, listed and removed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from sfu.errors import ArtifactError
from sfu.experiment.result_store import result_store
from sfu.files import human_size
from sfu.store import Store, cache_dir, key_of, size_of

A, B = key_of("a"), key_of({"b": [1, 2.5, None]})


def writes(text: str):
    return lambda folder: (folder / "x").write_text(text)


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_keys_follow_the_value_and_not_the_order():
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1}) != key_of({"a": 1, "b": 3})
    assert len(A) == 32


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({"SFU_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/x"), ({"XDG_CACHE_HOME": "/b"}, "/b/sfu/x"),
     ({"SFU_CACHE": "~/a"}, "{home}/a/x")],
)  # fmt: skip
def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path, variables, expected):
    monkeypatch.delenv("SFU_CACHE")
    for name, value in {"HOME": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    assert str(cache_dir("x")) == expected.format(home=tmp_path)


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def dies(folder):
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    store = Store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        store.put(A, dies)
    assert store.find(A) is None
    assert visible(tmp_path) == []


def test_an_entry_stays_unless_it_is_replaced(tmp_path):
    store = Store(tmp_path)
    for text, replace, expected in (("first", False, "first"), ("second", False, "first"), ("third", True, "third")):
        store.put(A, writes(text), replace=replace)
        assert (store.find(A) / "x").read_text() == expected
    assert visible(tmp_path) == [A]


def test_a_folder_without_an_entry_is_no_entry_and_makes_way(tmp_path):
    store = Store(tmp_path)
    (tmp_path / A).mkdir()
    (tmp_path / A / "stray").write_text("stray")
    assert store.find(A) is None
    assert not store.has(A)
    store.put(A, writes("x"))
    assert visible(store.find(A)) == ["entry.json", "x"]


def other_content(folder: Path) -> None:
    (folder / "x").write_text("Content")


def shorter(folder: Path) -> None:
    (folder / "x").write_text("conten")


def missing_file(folder: Path) -> None:
    (folder / "x").unlink()


def broken_about(folder: Path) -> None:
    (folder / "entry.json").write_text("{")


def about_without_digests(folder: Path) -> None:
    (folder / "entry.json").write_text(json.dumps({"key": folder.name}))


def about_of_another_type(folder: Path) -> None:
    (folder / "entry.json").write_text("[]")


def of_another_key(folder: Path) -> None:
    store = Store(folder.parent)
    store.put(B, writes("content"))
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / B, folder)


@pytest.mark.parametrize(
    "damage",
    [other_content, shorter, missing_file, broken_about, about_without_digests, about_of_another_type, of_another_key],
)
def test_a_damaged_or_foreign_entry_is_dropped(tmp_path, caplog, damage):
    store = Store(tmp_path)
    store.put(A, writes("content"))
    damage(tmp_path / A)
    assert store.find(A) is None
    assert "damaged and will be made again" in caplog.text
    assert not (tmp_path / A).exists()


def test_tensors_come_back_and_are_replaced(tmp_path):
    store = Store(tmp_path)
    assert store.read_tensors(A) is None
    for value in (1.5, 2.5):
        store.write_tensors(A, {"w": torch.full((2, 3), value, dtype=torch.float64)})
        assert store.read_tensors(A)["w"].equal(torch.full((2, 3), value, dtype=torch.float64))


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "below"
    with pytest.raises(ArtifactError, match=r"below cannot be written \(.*set SFU_CACHE to a folder you can write to"):
        Store(below).put(A, writes("x"))
    with pytest.raises(ArtifactError, match=r"Do this\."), Store(below, advice="Do this.").locked(A):
        pass
    with pytest.raises(ArtifactError, match="set SFU_CACHE to a folder you can write to, or set reuse=never"):
        result_store(below).put(A, writes("x"))
    assert Store(below).find(A) is None
    assert Store(below).entries() == []


def test_one_process_at_a_time(tmp_path):
    store, order, waited = Store(tmp_path), [], []

    def make(name):
        with store.locked(A, lambda: waited.append(name)):
            order.append(name)
            time.sleep(0.05)
            order.append(name)

    threads = [threading.Thread(target=make, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order[::2] == order[1::2]
    assert waited


_KILLED = """
import os, signal, sys
from pathlib import Path
from sfu.store import Store
def dies(folder):
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
store = Store(Path(sys.argv[1]))
with store.locked(sys.argv[2]):
    store.put(sys.argv[2], dies)
"""


def test_a_killed_process_leaves_no_entry_and_no_lock_and_its_leftovers_go(tmp_path):
    assert subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path), A], check=False).returncode == -9
    store = Store(tmp_path)
    assert store.find(A) is None
    with store.locked(A, lambda: pytest.fail("the lock is still held")):
        store.put(A, writes("x"))
    store.remove_leftovers()
    assert len(visible(tmp_path)) == 2  # it may still be at work: it is not a day old
    store.remove_leftovers(older_than=0.0)
    assert visible(tmp_path) == [A]


def test_entries_are_listed_by_use_and_other_folders_are_left_alone(tmp_path):
    store = Store(tmp_path)
    for key in (A, B):
        store.put(key, writes("x"))
        os.utime(tmp_path / key / "entry.json", (0, 0))
    (tmp_path / "notes").mkdir()
    store.find(A)
    assert [entry.key for entry in store.entries()] == [A, B]
    assert [entry.used.year for entry in store.entries()][1] == 1970
    store.describe(key_of("c"), {"shown": "more"})
    assert store.entries()[0].about["shown"] == "more"
    for entry in store.entries():
        store.remove(entry.key)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    store.remove(A)  # there is none, which is no error


def test_an_entry_in_use_is_not_removed(tmp_path):
    store = Store(tmp_path)
    store.put(A, writes("x"))
    with FileLock(tmp_path / f".{A}.lock"), pytest.raises(ArtifactError, match=f"{A[:12]} is in use by a run"):
        store.remove(A)
    assert store.find(A) is not None


def test_large_files_are_shared_and_count_once(tmp_path):
    shared, plain = Store(tmp_path / "shared", share_large_files=True), Store(tmp_path / "plain")
    for store in (shared, plain):
        for key in (A, B):
            store.put(key, lambda folder: (folder / "core").write_bytes(bytes(2 << 20)))
            assert store.find(key) is not None
    assert 2 << 20 < size_of(shared.entries()) < 3 << 20
    assert 4 << 20 < size_of(plain.entries()) < 5 << 20
    (blob,) = shared.root.glob(".*.blob")
    shared.remove(A)
    shared.remove_leftovers()
    assert blob.exists()
    shared.remove(B)
    shared.remove_leftovers()
    assert visible(shared.root) == []


def test_readers_see_a_complete_entry_while_it_is_replaced(tmp_path):
    store, stop = Store(tmp_path), threading.Event()

    def replace():
        value = 0
        while not stop.is_set():
            value += 1
            Store(tmp_path).write_tensors(A, {"w": torch.full((500,), float(value))})

    writers = [threading.Thread(target=replace) for _ in range(2)]
    for writer in writers:
        writer.start()
    deadline, found = time.monotonic() + 20, []
    while len(found) < 50 and time.monotonic() < deadline:
        tensors = store.read_tensors(A)
        if tensors is not None:
            found.append(tensors["w"])
    stop.set()
    for writer in writers:
        writer.join()
    assert len(found) == 50
    assert all(one.eq(one[0]).all() for one in found)
    assert visible(tmp_path) == [A]


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (2**52, "4096.0 TiB")],
)
def test_sizes_for_people(n_bytes, text):
    assert human_size(n_bytes) == text
