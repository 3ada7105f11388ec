"""The command sfu-results, on a store that a run has filled."""

from __future__ import annotations

import os
import re
import time

import pytest

from sfu.cli.results import main
from sfu.experiment.result_store import result_store
from sfu.store import Store

# files that are left open
pytestmark = pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")


def filled(root) -> Store:
    """A head, a row and a run; the row is ten days old. Head and row share a large file."""
    store = result_store(root)
    large = bytes(2 << 20)
    for key, name in (("a", "head.json"), ("b", "row.json"), ("c", "metrics.json")):

        def write(folder, name=name):
            (folder / name).write_text("{}")
            if name != "metrics.json":
                (folder / "core.safetensors").write_bytes(large)

        store.put(key * 32, write)
    old = time.time() - 10 * 86_400
    os.utime(root / ("b" * 32) / "entry.json", (old, old))
    return store


def test_what_is_kept_is_listed_and_a_shared_file_counts_once(tmp_path, capsys):
    filled(tmp_path)
    main(["ls", "--cache", str(tmp_path)])
    shown = capsys.readouterr().out
    assert re.search(r"^head +1 +2\.0 MiB", shown, re.M)
    assert re.search(r"^row +1 +2\.0 MiB", shown, re.M)
    assert re.search(r"^3 in .*, 2\.0 MiB in all\.$", shown, re.M)
    main(["ls", "--cache", str(tmp_path / "none")])
    assert "No results are cached" in capsys.readouterr().out


def test_what_is_old_or_everything_goes_and_so_does_what_the_killed_left(tmp_path, capsys):
    store = filled(tmp_path)
    left = tmp_path / ".deadbeef.x"
    left.mkdir()
    os.utime(left, (0, 0))
    main(["rm", "--unused", "5", "--cache", str(tmp_path)])
    assert "Removed 1 entry" in capsys.readouterr().out
    assert [store.has(key * 32) for key in "abc"] == [True, False, True]
    assert store.find("a" * 32) is not None
    assert list(tmp_path.glob("*.blob")) or list(tmp_path.glob(".*.blob"))
    main(["rm", "--all", "--cache", str(tmp_path)])
    assert "Removed 2 entries" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    main(["rm", "--all", "--cache", str(tmp_path)])
    assert "Nothing to remove" in capsys.readouterr().out


def test_everything_goes_although_the_clock_of_the_disk_is_ahead(tmp_path, capsys):
    store = filled(tmp_path)
    for entry in store.entries():
        os.utime(entry.folder / "entry.json", (2**32, 2**32))
    main(["rm", "--all", "--cache", str(tmp_path)])
    assert "Removed 3 entries" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["rm"], "rm needs --all or --unused DAYS"), (["rm", "--all", "--unused", "3"], "rm needs --all or --unused DAYS"),
     (["rm", "--unused", "-1"], r"--unused -1 is not a number of days"),
     (["rm", "--unused", "nan"], r"--unused nan is not a number of days")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--cache", str(tmp_path)])
    assert stop.value.code == 1
    assert re.search(message, capsys.readouterr().err)
