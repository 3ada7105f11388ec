from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sfu.data.settings import ForgetSettings
from sfu.data.split import make_split
from sfu.errors import ConfigError, DataError

LABELS = torch.arange(40) % 4


def split(seed: int = 0, **settings: object):
    return make_split(ForgetSettings(**settings), LABELS, 4, seed)


@given(n=st.integers(2, 200), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**31))
def test_both_sides_partition_the_rows(n, fraction, seed):
    if not 0 < round(fraction * n) < n:
        return
    made = make_split(ForgetSettings(fraction=fraction), torch.arange(n) % 2, 2, seed)
    assert made.forget_F.numel() == round(fraction * n)
    assert torch.equal(torch.cat([made.forget_F, made.retain_R]).sort().values, torch.arange(n))


def test_a_tenth_unless_something_else_is_asked_for():
    assert split().forget_F.numel() == 4
    assert split().kind == "fraction"


def test_the_seed_decides():
    assert torch.equal(split(1, fraction=0.3).forget_F, split(1, fraction=0.3).forget_F)
    assert not torch.equal(split(1, fraction=0.3).forget_F, split(2, fraction=0.3).forget_F)


def test_classes_whole_and_in_part():
    whole = split(classes=[1, 3])
    assert whole.forget_F.tolist() == [i for i in range(40) if i % 4 in (1, 3)]
    part = split(classes=[1, 3], fraction=0.5)
    assert part.forget_F.numel() == 10
    assert set(part.forget_F.tolist()) < set(whole.forget_F.tolist())
    assert (whole.kind, part.kind) == ("classes", "classes")


@pytest.mark.parametrize("suffix", [".txt", ".json", ".npy"])
def test_index_files(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    rows = [7, 0, 39]
    if suffix == ".npy":
        np.save(path, np.array(rows))
    else:
        path.write_text(json.dumps(rows) if suffix == ".json" else "7\n0\n39\n")
    made = split(indices=str(path))
    assert made.forget_F.tolist() == [0, 7, 39]
    assert made.retain_R.numel() == 37


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty forget set"),
        ("1\n1\n", "row 1 more than once"),
        ("40\n", r"rows 40 \.\. 40\. The training rows are 0 \.\. 39"),
        ("-1\n", r"rows -1"),
        ("1.5\n", "cannot be read .*Give row numbers"),
        ("1_0\n", "cannot be read .*Give row numbers"),
        ("one\n", "cannot be read .*Give row numbers"),
        ("\n".join(map(str, range(40))), "all 40 training rows"),
    ],
)
def test_index_files_that_cannot_work(tmp_path, text, message):
    path = tmp_path / "rows.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        split(indices=str(path))


@pytest.mark.parametrize("value", ['{"a": 1}', "[[1, 2]]", "[1.5]", '["a"]', "[true]"])
def test_json_must_be_a_flat_list_of_integers(tmp_path, value):
    path = tmp_path / "rows.json"
    path.write_text(value)
    with pytest.raises(DataError, match=r"rows\.json"):
        split(indices=str(path))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"fraction": 0.0}, ConfigError, r"forget\.fraction=0\.0"),
        ({"fraction": -0.1}, ConfigError, r"forget\.fraction=-0\.1"),
        ({"fraction": 1.5}, ConfigError, r"forget\.fraction=1\.5"),
        ({"fraction": 1.0}, DataError, "all 40 training rows"),
        ({"fraction": 0.001}, DataError, "empty forget set"),
        ({"classes": []}, DataError, "empty forget set"),
        ({"classes": [4]}, DataError, r"names \[4\]\. The classes are 0 \.\. 3"),
        ({"classes": [1, 1]}, DataError, "twice"),
        ({"classes": [0, 1, 2, 3]}, DataError, "all 40 training rows"),
        ({"indices": "x", "fraction": 0.1}, ConfigError, "stands alone"),
        ({"indices": "no-such-file"}, DataError, r"no-such-file cannot be read \(No such file or directory\)"),
    ],
)
def test_settings_that_cannot_work(settings, error, message):
    with pytest.raises(error, match=message):
        split(**settings)


def test_a_class_without_rows_is_an_empty_forget_set():
    with pytest.raises(DataError, match="no training row has these labels"):
        make_split(ForgetSettings(classes=[4]), LABELS, 5, 0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npy", b"", r"cannot be read \(it is no npy file\)\. Give row numbers"),
        ("a.json", b"", r"cannot be read \(Invalid JSON"),
        ("a.npy", b"PK\x03\x04" + bytes(40), "it is no npy file"),
        ("a.json", b"[" * 9, "recursion limit|Invalid JSON"),
        ("a.json", b"[" * 60_000, "holds more than 41 values"),
        ("a.json", b"[" + b"1," * 30_000 + b"1]", "holds more than 41 values"),
        ("a.json", b'["' + b"x" * 80_000 + b'"]', r"it has 78\.1 KiB, and at most 66\.5 KiB are read"),
        ("a.txt", b"1\n" * 40_000, r"it has 78\.1 KiB"),
        ("a.txt", b"1\n" * 30_000, "holds 30000 numbers for 40 training rows. List every row once"),
        ("a.txt", b"9" * 5000, "cannot be read"),
    ],
)
def test_lists_of_rows_that_do_harm_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        split(indices=str(tmp_path / name))


def test_an_npz_under_the_name_of_an_npy_and_a_forged_shape_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", np.arange(3))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(DataError, match="it is no npy file"):
        split(indices=str(tmp_path / "a.npy"))
    np.save(tmp_path / "b.npy", np.arange(3))
    body = (tmp_path / "b.npy").read_bytes().replace(b"(3,), }       ", b"(3000000000,), }", 1)
    (tmp_path / "b.npy").write_bytes(body)
    with pytest.raises(DataError, match=r"shape \[3000000000\], which takes 24,000,000,000 bytes, but holds"):
        split(indices=str(tmp_path / "b.npy"))


def test_a_list_of_files_that_is_far_too_long_is_refused_before_it_is_read(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 70_000)
    with pytest.raises(
        DataError, match=r"it has 68\.4 KiB, and at most 6[45]\.\d KiB are read\)\. Give one file name a line"
    ):
        make_split(ForgetSettings(files=str(tmp_path / "a.txt")), LABELS[:2], 2, 0, (), ["a.png", "b.png"])


CARDS = ("10", "2", "3", "A", "J", "K")


@pytest.mark.parametrize(
    ("names", "given", "wanted"),
    [
        (CARDS, [10], [0]),
        (CARDS, ["A", 2], [1, 3]),
        (CARDS, ["10"], [0]),
        (("ant", "bee", "cat"), [2, "ant"], [0, 2]),
        ((), [2], [2]),
        (("1e3", "1000", "x"), [1000], [1]),
        (("1e3", "1000", "x"), [1000.0], [0]),
        (("false", "null", "true", "nan", "x"), [True, None, False, float("nan")], [0, 1, 2, 3]),
        (("Cafe\u0301", "Cafe", "ö"), ["Caf\u00e9", "o\u0308"], [0, 2]),
    ],
)
def test_a_class_is_given_by_its_name_or_by_number_if_no_name_is_a_number(names, given, wanted):
    count = len(names) or 4
    made = make_split(ForgetSettings(classes=given), torch.arange(40) % count, count, 0, names)
    assert sorted({row % count for row in made.forget_F.tolist()}) == wanted


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        (
            CARDS,
            [1],
            r"1 is not a class, and because some classes are named by numbers, a number is a name.*include 10",
        ),
        (("007", "7", "x"), [7], r"7 is the name of the classes '007' and '7'.*='\[\"007\"\]'"),
        (
            ("NO", "SE", "DK"),
            [False],
            "False is not a class.* include NO, SE, DK. Put the name in quotes",
        ),
        (("ant", "bee", "cat"), [3], r"names \[3\]\. The classes are 0 \.\. 2"),
        ((), ["ant"], "'ant' is not a class. This dataset has numbers only"),
    ],
)
def test_a_class_that_is_no_name_or_several_is_refused(names, given, message):
    with pytest.raises(DataError, match=message):
        make_split(ForgetSettings(classes=given), torch.arange(40) % 3, 3, 0, names)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(("name", "text"), [("a.txt", "7\r\n0\r\n39\r\n"), ("a.json", "[7, 0, 39]")])
def test_row_numbers_with_a_byte_order_mark(tmp_path, encoding, name, text):
    (tmp_path / name).write_text(text, encoding=encoding)
    assert split(indices=str(tmp_path / name)).forget_F.tolist() == [0, 7, 39]


IMAGES = (
    "data/train/Zoe\u0308/1.jpg",
    "data/train/Zo\u00e9/1.jpg",
    "data/train/Zo\u00e9/2.jpg",
    "data/train/x/y/z/1.jpg",
)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    ("line", "row"),
    [
        ("Zo\u00eb/1.jpg", 0),
        ("Zoe\u0301/1.jpg", 1),
        ("2.jpg", 2),
        ("./Zo\u00e9/2.jpg", 2),
        ("Zo\u00e9\\2.jpg", 2),
        ("data/train/x/y/z/1.jpg", 3),
        (os.path.abspath("data/train/x/y/z/1.jpg"), 3),
    ],
)
def test_a_line_names_an_image_in_any_common_spelling(tmp_path, encoding, line, row):
    (tmp_path / "wish.txt").write_text(f"{line}\r\n", encoding=encoding)
    made = make_split(ForgetSettings(files=str(tmp_path / "wish.txt")), LABELS[:4], 4, 0, (), IMAGES)
    assert made.forget_F.tolist() == [row]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1.jpg", "several images end in '1.jpg'. Give more of the path"),
        ("e/1.jpg", "'e/1.jpg' is not an image of the training part"),
        ("/x/y/z/1.jpg", "'/x/y/z/1.jpg' is not an image of the training part .near: z/1.jpg"),
        ("2.jpg\nZo\u00e9/2.jpg", "names 'Zo\u00e9/2.jpg' more than once"),
    ],
)
def test_a_line_that_names_no_image_or_several_is_refused(tmp_path, line, message):
    (tmp_path / "wish.txt").write_text(line, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        make_split(ForgetSettings(files=str(tmp_path / "wish.txt")), LABELS[:4], 4, 0, (), IMAGES)
