from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sfu.data.download import Archive, obtain, require_obtainable
from sfu.errors import ArtifactError, ConfigError, DataError
from tests.data.image_samples import Server, pack, serving, write_folder

NAMES = [f"things/{letter}/{number}.jpg" for letter in "ab" for number in range(30)]
NAMES_SORTED = sorted(NAMES)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture(scope="module")
def body(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("published")
    return pack(folder / "things.tar", write_folder(folder, NAMES), ["things"])


@pytest.fixture
def server(body):
    with serving({"/things.tar": body}) as running:
        yield running


def published(server: Server, **changes) -> Archive:
    body = server.files["/things.tar"]
    about = {
        "url": f"{server.url}/things.tar",
        "filename": "things.tar",
        "algorithm": "sha256",
        "checksum": hashlib.sha256(body).hexdigest(),
        "entries": ("things",),
        "size": len(body),
    }
    return Archive(**{**about, **changes})


def get(archive: Archive, folder: Path) -> None:
    obtain([archive], folder, download=True, pause_s=0.0)


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jpg"))


def visible(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.endswith(".lock"))


@pytest.mark.parametrize("known", ["size", "no size", "md5"])
def test_archive_is_fetched_checked_and_extracted_once(server, tmp_path, known):
    changes = {
        "size": {},
        "no size": {"size": None},
        "md5": {"algorithm": "md5", "checksum": hashlib.md5(server.files["/things.tar"]).hexdigest()},
    }[known]
    for _ in range(2):
        get(published(server, **changes), tmp_path / "new" / "root")
    assert names_below(tmp_path / "new" / "root") == NAMES_SORTED
    assert visible(tmp_path / "new" / "root") == ["things", "things.tar"]
    assert server.asked == [("/things.tar", None)]


def test_dropped_connection_is_taken_up_where_it_broke(server, tmp_path):
    server.drops = [1000, 20_000]
    get(published(server), tmp_path)
    assert [wanted for _, wanted in server.asked] == [None, "bytes=1000-", "bytes=21000-"]
    assert names_below(tmp_path) == NAMES_SORTED


def test_server_without_ranges_is_read_from_the_start(server, tmp_path):
    server.ranges, server.drops = False, [1000]
    get(published(server), tmp_path)
    assert [wanted for _, wanted in server.asked] == [None, "bytes=1000-"]
    assert names_below(tmp_path) == NAMES_SORTED


@pytest.mark.parametrize("size", ["known", "unknown"])
def test_part_of_another_file_is_thrown_away(server, tmp_path, size):
    archive = published(server, **({} if size == "known" else {"size": None}))
    (tmp_path / "things.tar.part").write_bytes(b"x" * 1000)  # right length, wrong bytes: the checksum tells
    get(archive, tmp_path)
    assert [wanted for _, wanted in server.asked] == ["bytes=1000-", None]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "things.tar.part").write_bytes(b"x" * (len(server.files["/things.tar"]) + 1))
    get(archive, tmp_path / "other")
    assert names_below(tmp_path / "other") == NAMES_SORTED


def test_complete_part_of_a_killed_process_is_used(server, tmp_path):
    (tmp_path / "things.tar.part").write_bytes(server.files["/things.tar"])
    get(published(server), tmp_path)
    assert server.asked == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "things.tar.part").write_bytes(server.files["/things.tar"])
    get(published(server, size=None), tmp_path / "other")
    assert len(server.asked) == 1
    assert names_below(tmp_path / "other") == NAMES_SORTED


def test_busy_server_is_asked_again_and_a_missing_file_is_not(server, tmp_path):
    server.answers = [(503, ""), (429, "")]
    get(published(server), tmp_path)
    assert len(server.asked) == 3
    with pytest.raises(DataError, match=r"404 .*by hand"):
        get(published(server, url=f"{server.url}/gone.tar"), tmp_path / "other")
    assert len(server.asked) == 4


def test_wrong_checksum_names_both_and_leaves_nothing(server, tmp_path):
    right = hashlib.sha256(server.files["/things.tar"]).hexdigest()
    with pytest.raises(DataError, match=rf"sha256 is {right}, not {'0' * 64}\. It was removed"):
        get(published(server, checksum="0" * 64), tmp_path)
    assert visible(tmp_path) == []


def test_wrong_size_is_refused_before_it_is_fetched(server, tmp_path):
    with pytest.raises(DataError, match=r"offers \d+ bytes, not 17"):
        get(published(server, size=17), tmp_path)
    assert visible(tmp_path) == []


def test_without_network_it_says_how_to_do_by_hand(tmp_path):
    with serving({"/things.tar": b""}) as server:
        archive = published(server, url=f"{server.url}/things.tar", checksum="abc")
    with pytest.raises(DataError) as caught:
        get(archive, tmp_path)
    for part in (archive.url, str(tmp_path / "things.tar"), "sha256 abc", "dataset.download=false"):
        assert part in str(caught.value)
    with pytest.raises(DataError, match=r"neither things nor things\.tar, and dataset\.download=false.*sha256 abc"):
        require_obtainable([archive], tmp_path, download=False)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/things.tar", "file:///etc/passwd", "data:,x"])
def test_only_http_is_spoken(server, tmp_path, url):
    with pytest.raises(ConfigError, match="not an http or https address"):
        get(published(server, url=url), tmp_path)
    server.answers = [(302, url)] * 9
    with pytest.raises(DataError, match=r"cannot be downloaded: .*No connection adapters were found"):
        get(published(server), tmp_path)
    assert visible(tmp_path) == []


def test_full_disk_keeps_the_part(server, tmp_path, monkeypatch):
    real_open = Path.open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, chunk):
            self.file.write(chunk[:1000])
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode="r", **more: Full(real_open(path, mode, **more)))
        with pytest.raises(ArtifactError, match=r"No space left on device.*Free some space.*stays"):
            get(published(server), tmp_path)
    assert (tmp_path / "things.tar.part").stat().st_size == 1000
    get(published(server), tmp_path)
    assert server.asked[-1][1] == "bytes=1000-"
    assert names_below(tmp_path) == NAMES_SORTED


_CHILD = """
import sys
from pathlib import Path
from sfu.data.download import Archive, obtain
url, checksum, folder = sys.argv[1:]
print("ready", flush=True)
obtain([Archive(url, "things.tar", "sha256", checksum, ("things",))], Path(folder), download=True)
"""


def start_child(server: Server, folder: Path) -> subprocess.Popen:
    archive = published(server)
    command = [sys.executable, "-c", _CHILD, archive.url, archive.checksum, str(folder)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_download_is_resumed_and_two_processes_fetch_once(server, tmp_path):
    part = tmp_path / "things.tar.part"
    server.stalls = True
    killed = start_child(server, tmp_path)
    wait_for(lambda: part.exists() and part.stat().st_size > 0)
    time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    have = part.stat().st_size
    assert 0 < have < len(server.files["/things.tar"])
    children = [start_child(server, tmp_path) for _ in range(2)]
    wait_for(lambda: len(server.asked) == 2)
    server.go_on.set()
    for child in children:
        child.communicate(timeout=20)
        assert child.returncode == 0
    assert [wanted for _, wanted in server.asked] == [None, f"bytes={have}-"]
    assert names_below(tmp_path) == NAMES_SORTED


def test_progress_is_a_bar_on_terminals_alone(server, tmp_path, capsys, caplog, monkeypatch):
    with caplog.at_level("INFO"):
        get(published(server), tmp_path)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["downloading", "extracting"]
    assert capsys.readouterr().err == ""
    caplog.clear()
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, standard error is then a terminal
    with caplog.at_level("INFO"):
        get(published(server), tmp_path / "other")
    assert caplog.records == []
    assert "downloading" in capsys.readouterr().err
