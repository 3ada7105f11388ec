from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
from collections import namedtuple
from pathlib import Path

import pytest

from sfu.data.archive import extract
from sfu.data.download import Archive, obtain
from sfu.errors import ArtifactError, DataError
from tests.data.image_samples import pack, write_folder

NAMES = ["things/a.jpg", "things/b.jpg"]


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, target, 4 if kind == tarfile.REGTYPE else 0
    return made


def write_tar(path: Path, members: list[tarfile.TarInfo]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for one in members:
            tar.addfile(one, io.BytesIO(b"evil") if one.isreg() else None)
    return path


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


EVIL = {
    "parent": [member("things/../../out")],
    "absolute": [member("{top}/out")],
    "symlink out": [member("things/x", tarfile.SYMTYPE, "../../out")],
    "absolute symlink": [member("things/x", tarfile.SYMTYPE, "{top}/out")],
    "hard link out": [member("things/x", tarfile.LNKTYPE, "../out")],
    "write through a link": [member("things/x", tarfile.SYMTYPE, "."), member("things/x/out")],
    "link to a link": [member("things/x", tarfile.SYMTYPE, "a"), member("things/y", tarfile.LNKTYPE, "things/x")],
    "link through a link": [member("things/x", tarfile.SYMTYPE, "."), member("things/y", tarfile.SYMTYPE, "x/../..")],
    "device": [member("things/x", tarfile.CHRTYPE)],
    "pipe": [member("things/x", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("kind", EVIL)
def test_members_that_lead_outside_are_refused_by_name(tmp_path, kind):
    members = [member("things/a.jpg"), *EVIL[kind]]
    for one in members:
        one.name, one.linkname = (text.format(top=tmp_path) for text in (one.name, one.linkname))
    archive = write_tar(tmp_path / "in" / "evil.tar", members)
    before = everything_in(tmp_path)
    named = members[-1].name.replace("..", r"\.\.")
    with pytest.raises(DataError, match=rf"evil\.tar is not safe to extract.*{named}"):
        extract(archive, ["things"], tmp_path / "in")
    assert everything_in(tmp_path) == before


def test_links_that_stay_inside_are_kept(tmp_path):
    links = [member("things/x", tarfile.SYMTYPE, "a.jpg"), member("things/y", tarfile.LNKTYPE, "things/a.jpg")]
    extract(write_tar(tmp_path / "good.tar", [member("things/a.jpg"), *links]), ["things"], tmp_path)
    assert {(tmp_path / "things" / name).read_bytes() for name in ("a.jpg", "x", "y")} == {b"evil"}


@pytest.mark.parametrize("name", ["things.tar", "things.tar.gz"])
def test_truncated_archives_are_named_and_leave_nothing(tmp_path, name):
    whole = pack(tmp_path / "source" / name, write_folder(tmp_path / "source", NAMES), ["things"])
    for length in (len(whole) // 2, len(whole) // 10, 10, 0):
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / name).write_bytes(whole[:length])
        with pytest.raises(DataError, match=rf"{name} (is cut short or damaged|holds no things)"):
            extract(folder / name, ["things"], folder)
        assert os.listdir(folder) == [name]


def test_placed_archive_is_checked_before_it_is_opened(tmp_path):
    whole = pack(tmp_path / "source" / "things.tar", write_folder(tmp_path / "source", NAMES), ["things"])
    right = hashlib.md5(whole).hexdigest()
    archive = Archive("http://invalid/things.tar", "things.tar", "md5", right, ("things",), len(whole))
    placed = tmp_path / "things.tar"
    placed.write_bytes(whole[:-100])
    wrong = hashlib.md5(whole[:-100]).hexdigest()
    with pytest.raises(DataError, match=rf"md5 {wrong}, .* {right}.*cut short: {len(whole) - 100} of {len(whole)}"):
        obtain([archive], tmp_path, download=True)
    assert placed.exists()  # it is not sfu's to remove
    placed.write_bytes(whole)
    obtain([archive], tmp_path, download=False)
    assert everything_in(tmp_path / "things") == ["a.jpg", "b.jpg"]


def test_interrupted_extraction_is_not_believed(tmp_path, monkeypatch):
    pack(tmp_path / "things.tar", write_folder(tmp_path / "source", NAMES), ["things"])
    (tmp_path / ".things.tar.extracting" / "things").mkdir(parents=True)  # as a killed process leaves it
    (tmp_path / ".things.tar.extracting" / "things" / "stale.jpg").write_text("half")
    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "extract", interrupt)
        with pytest.raises(KeyboardInterrupt):
            extract(tmp_path / "things.tar", ["things"], tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["source", "things.tar"]
    extract(tmp_path / "things.tar", ["things"], tmp_path)
    assert everything_in(tmp_path / "things") == ["a.jpg", "b.jpg"]


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["things.tar", "things.tar.gz"])
def test_too_little_space_is_noticed_first(tmp_path, monkeypatch, name):
    pack(tmp_path / name, write_folder(tmp_path / "source", [f"things/{n}.jpg" for n in range(50)]), ["things"])
    usage = namedtuple("usage", "total used free")(0, 0, 20_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ArtifactError, match=r"MiB free\. Free some space, or choose another folder by dataset\.root"):
        extract(tmp_path / name, ["things"], tmp_path)


def test_pythons_without_the_filter_are_refused(tmp_path, monkeypatch):
    monkeypatch.delattr(tarfile, "data_filter")
    with pytest.raises(DataError, match=r"Use 3\.11\.4 or later"):
        extract(tmp_path / "things.tar", ["things"], tmp_path)


def test_archive_of_something_else_is_refused(tmp_path):
    pack(tmp_path / "things.tar", write_folder(tmp_path / "source", NAMES), ["things"])
    with pytest.raises(DataError, match=r"holds no stuff and no more, so it is not the published archive"):
        extract(tmp_path / "things.tar", ["things", "stuff", "more"], tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["source", "things.tar"]
