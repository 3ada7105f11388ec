"""Whose rows they are: groups in feature files and CSV files of labels, and requests that name them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from sfu.data.datasets.base import Dataset
from sfu.data.feature_data import Groups
from sfu.data.load import load_dataset
from sfu.data.settings import ForgetSettings
from sfu.data.split import make_split
from sfu.errors import ConfigError, DataError
from tests.data.image_samples import write_folder
from tests.data.test_image_folder import write_csv
from tests.experiment import cases
from tests.experiment.cases import composed, image_config, run

PEOPLE = np.array(["bob", "alice", "carol", "alice"] * 10)
LABELS = torch.arange(40) % 2


def forget(*groups: object, whose: np.ndarray | None = PEOPLE, **settings: object) -> list[int]:
    config = ForgetSettings(groups=list(groups), **settings)
    return make_split(config, LABELS, 2, 0, groups=Groups.of(whose)).forget_F.tolist()


@pytest.mark.parametrize(
    ("whose", "given", "wanted"),
    [
        (PEOPLE, ["alice"], {"alice"}),
        (PEOPLE, ["alice", "bob"], {"alice", "bob"}),
        (PEOPLE, [2], {"carol"}),  # no name is a number: the third in sorted order
        (np.arange(40) // 4 + 7, [7, 10], {7, 10}),
        (np.array(["07", "x", "y", "z"] * 10), ["07"], {"07"}),
        (np.array(["", "x", "y", ""] * 10), ["x"], {"x"}),
    ],
)
def test_all_rows_of_the_named_groups_are_forgotten(whose, given, wanted):
    assert forget(*given, whose=whose) == [row for row in range(40) if whose[row] in wanted]


def test_a_fraction_takes_a_part_of_a_group_and_the_request_is_a_persons():
    theirs = set(forget("alice"))
    assert (len(theirs), len(forget("alice", fraction=0.25))) == (20, 5)
    assert set(forget("alice", fraction=0.25)) < theirs
    made = make_split(ForgetSettings(groups=["bob"]), LABELS, 2, 0, groups=Groups.of(PEOPLE))
    assert (made.kind, made.request) == ("groups", "person")
    told = ForgetSettings(groups=["bob"], request="random")
    assert make_split(told, LABELS, 2, 0, groups=Groups.of(PEOPLE)).request == "random"


@pytest.mark.parametrize(
    ("whose", "given", "settings", "error", "message"),
    [
        (PEOPLE, ["alise"], {}, DataError, "'alise' is not a group. Its names include alice"),
        (PEOPLE, [3], {}, DataError, r"names \[3\]\. The groups are 0 \.\. 2"),
        (PEOPLE, ["bob", "bob"], {}, DataError, "names a group twice"),
        (PEOPLE, [], {}, DataError, "empty forget set"),
        (PEOPLE, ["alice", "bob", "carol"], {}, DataError, "all 40 training rows belong to one of these groups"),
        (np.full(40, "bob"), ["bob"], {}, DataError, "all 40 training rows belong to the only group, bob"),
        (np.full(40, ""), ["bob"], {}, DataError, "'bob' is not a group"),
        (None, ["bob"], {}, ConfigError, "does not say whose its rows are. Add train_groups"),
        (PEOPLE, ["bob"], {"classes": [0]}, ConfigError, "do not go together"),
        (PEOPLE, ["bob"], {"indices": "x"}, ConfigError, "stands alone"),
    ],
)
def test_groups_that_cannot_be_forgotten_are_refused(whose, given, settings, error, message):
    with pytest.raises(error, match=message):
        forget(*given, whose=whose, **settings)


def write_features(tmp_path, arrays, groups, *, kind="npz", parts=("train", "test")):
    held = {name: values for name, values in arrays.items() if name.startswith(parts)}
    path = tmp_path / f"people.{kind}"
    if kind == "npz":
        np.savez(path, **held, train_groups=groups)
    else:
        save_file({**held, "train_groups": groups}, path)
    return path


@pytest.mark.parametrize(
    ("kind", "groups", "names"),
    [
        ("npz", np.array(["a", "b", "ö", "a"] * 100), ("a", "b", "ö")),
        ("npz", np.array([b"a", b"b", b"c", b"a"] * 100), ("a", "b", "c")),
        ("npz", np.arange(400) % 3, ("0", "1", "2")),
        ("safetensors", (np.arange(400) % 3).astype(np.int32), ("0", "1", "2")),
    ],
)
def test_files_of_features_say_whose_their_rows_are(tmp_path, arrays, kind, groups, names):
    path = write_features(tmp_path, arrays, groups, kind=kind)
    data = load_dataset(Dataset.make("features", path=str(path)), 0)
    assert data.groups.names == names
    shown = [one.decode() if isinstance(one, bytes) else str(one) for one in groups.tolist()]
    assert [names[number] for number in data.groups.numbers_N] == shown


def test_a_drawn_test_part_takes_its_groups_along(tmp_path, arrays):
    path = write_features(tmp_path, arrays, np.arange(400), parts=("train",))
    data = load_dataset(Dataset.make("features", path=str(path)), 3)
    rows = [int(data.groups.names[number]) for number in data.groups.numbers_N]
    assert torch.equal(torch.from_numpy(arrays["train_features"][rows]), data.train_features_ND)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (np.arange(399), r"train_groups has shape \[399\] for 400 training rows"),
        (np.arange(400) / 2, "train_groups has dtype float64"),
        (np.array([{}] * 400, dtype=object), "never loads pickled objects"),
        (np.array([b"\xff"] * 400), "not Unicode"),
        (np.full(400, 0x7FFFFFFF, np.uint32).view("<U1"), "not Unicode"),
        (np.full(400, 0xD800, np.uint32).view("<U1"), "not Unicode"),
    ],
)
@pytest.mark.parametrize("parts", [("train",), ("train", "test")])
def test_groups_of_another_kind_are_refused(tmp_path, arrays, groups, message, parts):
    path = write_features(tmp_path, arrays, groups, parts=parts)
    with pytest.raises(DataError, match=message):
        load_dataset(Dataset.make("features", path=str(path)), 0)


@pytest.mark.parametrize("column", ["group", "person"])
def test_a_csv_file_of_labels_says_whose_the_images_are(tmp_path, column):
    folder = write_folder(tmp_path / "pile", ["a.jpg", "b.jpg", "c.jpg", "d.jpg"])
    write_csv(folder, f"{column},file,label", "zoe,b.jpg,x", " ann ,a.jpg,y", ",c.jpg,x", "zoe,d.jpg,y")
    found = Dataset.make("image_folder", path=str(folder), labels_csv="labels.csv").images()
    assert found.groups_N.tolist() == ["ann", "zoe", "", "zoe"]
    assert found.limited(1).groups_N.tolist() == ["ann", "zoe"]
    write_csv(folder, "file,label", "a.jpg,x", "b.jpg,y")
    assert Dataset.make("image_folder", path=str(folder), labels_csv="labels.csv").images().groups_N is None


def test_a_whole_run_forgets_one_persons_rows(tmp_path, arrays):
    groups = np.array(["alice", "bob", "carol", "dan"] * 100)
    path = write_features(tmp_path, arrays, groups)
    config = composed(f"dataset.path={path}", "dataset=features", "logger=none", "forget.groups=[alice]")
    config.methods = ["original", "retrained", "closed_form"]
    metrics = run(config, tmp_path)
    assert (metrics["run"]["data"]["n_forget"], metrics["run"]["forget"]["kind"]) == (100, "groups")
    assert metrics["run"]["forget"]["request"] == "person"
    assert "the request is for one person" in metrics["rows"]["closed_form"]["note"]


def test_a_whole_run_forgets_one_persons_images(tmp_path):
    folder = cases.write_folder(tmp_path / "images", per_class=20, n_test=4)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))
    people = {file: ["ann", "bob", "zoe"][index % 3] for index, file in enumerate(files)}
    write_csv(folder, "file,label,person", *(f"{file},{file.split('/')[1]},{who}" for file, who in people.items()))
    config = image_config(folder, dataset__labels_csv="labels.csv", forget__groups=["zoe"])
    about = run(config, tmp_path / "run")["run"]
    wanted = [f"{folder}/{file}" for file, who in people.items() if who == "zoe" and file.startswith("train/")]
    assert (tmp_path / "run" / "forget_files.txt").read_text().splitlines() == wanted
    assert about["data"]["n_forget"] == len(wanted) == 20
    config.forget.groups = ["Zoe"]
    with pytest.raises(DataError, match=r"'Zoe' is not a group\. Its names include zoe"):
        run(config, tmp_path / "run")
