from __future__ import annotations

import os
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from sfu.data.datasets.base import Dataset
from sfu.data.datasets.image_folder import ImageFolder as Folder
from sfu.data.images.files import IMAGE_ENDINGS
from sfu.errors import ConfigError, DataError
from tests.data.image_samples import write_classes, write_folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SFU_CACHE", str(tmp_path_factory.mktemp("cache")))


def config(path: Path | None, **settings) -> Folder:
    return Folder(path=path and str(path), **settings)


def names(found, folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in found.images.paths]


def refused(path: Path | None, message: str, error: type = DataError, **settings) -> None:
    with pytest.raises(error, match=message):
        config(path, **settings).images()


def test_the_file_endings_are_torchvisions():
    assert IMAGE_ENDINGS == IMG_EXTENSIONS


def test_one_folder_is_what_torchvision_reads(tmp_path):
    odd = ["bee/deeper/z.PNG", "bee/deeper-still/a.jpeg", "bee/notes.txt", "Zebra/1.jpg", "ant/10.jpg", "ant/9.tiff"]
    folder = write_folder(write_classes(tmp_path), [*odd, "loose.jpg"])
    found, theirs = config(folder).images(), ImageFolder(folder)
    assert [
        (str(path), label) for path, label in zip(found.images.paths, found.labels_N, strict=True)
    ] == theirs.samples
    assert found.class_names == tuple(theirs.classes)
    assert found.is_test_N is None
    assert config(folder).source_files() == [folder]


def test_train_and_test_are_the_parts(tmp_path):
    write_classes(tmp_path / "train")
    write_classes(tmp_path / "test", ("ant", "cat"), 2)
    found = config(tmp_path).images()
    assert names(found, tmp_path)[12:] == ["test/ant/0.jpg", "test/ant/1.jpg", "test/cat/0.jpg", "test/cat/1.jpg"]
    assert found.is_test_N.tolist() == [False] * 12 + [True] * 4
    assert found.labels_N.tolist()[12:] == [0, 0, 2, 2]


def test_hidden_things_are_left_out_and_links_followed(tmp_path):
    folder = write_classes(tmp_path / "data")
    before = names(config(folder).images(), folder)
    write_folder(folder, [".checkpoints/x.jpg", "ant/._0.jpg", "ant/.thumbs/0.jpg"])
    assert names(config(folder).images(), folder) == before
    write_folder(tmp_path, ["elsewhere/dog.jpg"])
    (folder / "ant" / "9.jpg").symlink_to(tmp_path / "elsewhere" / "dog.jpg")
    (folder / "dog").symlink_to(tmp_path / "elsewhere")
    found = config(folder).images()
    assert "ant/9.jpg" in names(found, folder)
    assert names(found, folder)[-1] == "dog/dog.jpg"
    assert found.images.decode(len(found.images) - 1).shape == (3, 10, 12)


def test_each_real_folder_is_read_once(tmp_path, caplog):
    folder = write_classes(tmp_path / "data")
    before = names(config(folder).images(), folder)
    assert not caplog.text
    for link, target in (("again", "."), ("up", ".."), ("ant/here", "."), ("ant/top", ".."), ("bee/cats", "../cat")):
        (folder / link).symlink_to(folder / target if "/" not in link else target)
    found = config(folder).images()
    assert names(found, folder) == before
    assert found.class_names == ("ant", "bee", "cat")
    assert "5 folders are left out, because links lead to what is read already (such as" in caplog.text
    config(folder).images()
    assert len(caplog.records) == 1  # told once, however often the folder is read
    (folder / "dog").symlink_to("cat")
    refused(folder, r"data/cat and .*data/dog are the same folder, so each of its images would count twice")


def test_one_folder_in_both_parts_is_refused(tmp_path):
    write_classes(tmp_path / "train")
    write_classes(tmp_path / "test", ("ant", "bee"))
    (tmp_path / "test" / "cat").symlink_to("../train/cat")
    refused(tmp_path, "train/cat and .*test/cat are the same folder")


def test_files_of_other_endings_are_told(tmp_path, caplog):
    folder = write_classes(tmp_path)
    write_folder(folder, ["ant/Thumbs.db", "ant/desktop.ini", "ant/.DS_Store", "bee/._1.jpg", "bee/9.JPG"])
    assert len(config(folder).images().images) == 13
    assert not caplog.text
    write_folder(folder, ["ant/1.gif", "bee/2.GIF", "bee/3.jfif", "cat/4"])
    assert len(config(folder).images().images) == 13
    assert ".tiff, .webp are left out: 2 .gif, 1 .jfif, 1 without an ending. Convert those that" in caplog.text
    (folder / "labels.csv").write_text("file,label\nant/1.gif,a\nbee/3.jfif,b\n")
    assert len(config(folder, labels_csv="labels.csv").images().images) == 2
    (write_folder(folder / "dog", ["1.heic"])).joinpath("2.heic").touch()
    refused(folder, r"no image in dog/\. Fill or remove it\..* It holds 2 \.heic\.|It holds 2 .gif")


def test_classes_that_differ_in_case_or_in_the_form_of_accents(tmp_path, caplog):
    write_classes(tmp_path / "train", ("Zo\u00eb", "Cat", "cat"), 1)
    write_classes(tmp_path / "test", ("Zoe\u0308", "cat"), 1)
    found = config(tmp_path).images()
    assert found.class_names == ("Cat", "Zo\u00eb", "cat")
    assert found.labels_N.tolist() == [0, 1, 2, 1, 2]
    assert "the classes Cat and cat differ in upper and lower case only" in caplog.text
    write_classes(tmp_path / "train", ("Zoe\u0308",), 1)
    refused(tmp_path, "are one class, written in two ways. Merge the two folders")


def test_folders_that_cannot_work(tmp_path):
    refused(None, r"needs dataset\.path", ConfigError)
    refused(tmp_path / "gone", r"dataset\.path=.*gone does not exist")
    refused(write_folder(tmp_path, ["f.zip"]) / "f.zip", "is not a folder")
    refused(write_folder(tmp_path / "flat", ["a.jpg", "b.jpg"]), r"holds no folders\. .* or name their classes")
    refused(write_classes(tmp_path / "one", ("ant",)), r"holds one class, ant\. At least two")
    refused(write_folder(tmp_path / "none", ["ant/a.txt", "bee/b.gif"]), r"no image in ant/, bee/\. Fill.*\.webp")
    empty = write_classes(tmp_path / "empty")
    (empty / "dog").mkdir()
    refused(empty, r"has no image in dog/\. Fill or remove it")


def test_parts_that_do_not_fit(tmp_path):
    write_classes(tmp_path / "train")
    write_classes(tmp_path / "val")
    with pytest.raises(DataError, match=r"has train/ but no test/ .*\. It holds train, val\. Add test/"):
        config(tmp_path).source_files()
    write_classes(tmp_path / "test", ("ant", "dog", "emu"))
    refused(tmp_path, r"test has classes that .*train lacks: dog, emu")
    (tmp_path / "other" / "train" / "ant").mkdir(parents=True)
    write_classes(tmp_path / "other" / "test", ("ant", "bee"))
    (tmp_path / "other" / "train" / "bee").mkdir()
    refused(tmp_path / "other", r"other/train has no image in ant/, bee/")
    refused(write_classes(tmp_path / "only" / "test").parent, r"has test/ but no train/")


def test_a_class_may_be_called_train(tmp_path):
    assert config(write_classes(tmp_path, ("boat", "train"))).images().class_names == ("boat", "train")


@pytest.mark.parametrize(("key", "value"), [("root", "x"), ("clutter", True), ("official_split", False)])
def test_settings_without_a_meaning_are_refused(tmp_path, key, value):
    with pytest.raises(ConfigError, match=rf"dataset\.{key} is not a setting of dataset=image_folder"):
        Dataset.make("image_folder", path=str(write_classes(tmp_path)), **{key: value})


@pytest.fixture
def pile(tmp_path) -> Path:
    return write_folder(tmp_path / "pile", ["a.jpg", "b.jpg", "c.jpg", "sub/d.jpg", "sub/e.jpg", "f.gif"])


def write_csv(folder: Path, *lines: str, name: str = "labels.csv") -> Path:
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    return folder


def test_csv_labels_by_name_whatever_its_order(pile, caplog):
    rows = [("sub/d.jpg", "Übel"), ("./a.jpg", " cat "), ("f.gif", "cat"), ("b.jpg", '"dog, big"')]
    found = config(write_csv(pile, "file,label", *map(",".join, rows)), labels_csv="labels.csv").images()
    assert names(found, pile) == ["a.jpg", "b.jpg", "f.gif", "sub/d.jpg"]
    assert found.class_names == ("cat", "dog, big", "Übel")
    assert found.labels_N.tolist() == [0, 1, 0, 2]
    assert found.is_test_N is None
    assert "2 images below" in caplog.text  # c.jpg and sub/e.jpg
    write_csv(pile, "label,weight,file", *(f"{label},1,{name}" for name, label in rows[::-1]), name="other.csv")
    again = config(pile, labels_csv=str(pile / "other.csv")).images()
    assert again.images.fingerprint() == found.images.fingerprint()
    assert again.labels_N.tolist() == found.labels_N.tolist()


def test_csv_with_split_and_integers(pile):
    rows = ["1,train,a.jpg", "0,test,b.jpg", "", "2,train,c.jpg", "0,train,sub/d.jpg"]
    found = config(write_csv(pile, "label,split,file", *rows), labels_csv="labels.csv").images()
    assert found.class_names == ("0", "1", "2")
    assert found.labels_N.tolist() == [1, 0, 2, 0]
    assert found.is_test_N.tolist() == [False, True, False, False]
    csv_file = pile / "labels.csv"
    assert config(pile, labels_csv=str(csv_file)).source_files() == [pile, csv_file]


def test_csv_over_train_and_test_folders(tmp_path):
    write_classes(tmp_path / "train", ("x", "y"), 2)
    write_classes(tmp_path / "test", ("x", "y"), 1)
    rows = ["train/x/0.jpg,b", "train/y/1.jpg,a", "test/x/0.jpg,a"]
    found = config(write_csv(tmp_path, "file,label", *rows), labels_csv="labels.csv").images()
    assert found.is_test_N.tolist() == [True, False, False]
    write_csv(tmp_path, "file,label", *rows[:2])  # of train/ alone: nothing is left to test with
    assert config(tmp_path, labels_csv="labels.csv").images().is_test_N is None
    write_csv(write_folder(tmp_path, ["loose.jpg"]), "file,label", *rows, "loose.jpg,a")
    refused(tmp_path, r"'loose\.jpg' lies in neither train/ nor test/.*Add a split column", labels_csv="labels.csv")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_csv_names_files_and_classes_in_any_common_spelling(tmp_path, encoding):
    folder = write_folder(tmp_path, ["Zoe\u0308/1.jpg", "b/2.jpg", ".shots/3.jpg", "b/4.jpg"])
    (folder / "all").symlink_to("b")
    rows = ["Zo\u00eb/1.jpg,Zo\u00eb", "b\\2.jpg,Zoe\u0308", "./.shots/3.jpg,x", "all\\4.jpg,x"]
    (folder / "labels.csv").write_text("\r\n".join(["file,label", *rows]), encoding=encoding)
    found = config(folder, labels_csv="labels.csv").images()
    assert names(found, folder) == [".shots/3.jpg", "Zoe\u0308/1.jpg", "all/4.jpg", "b/2.jpg"]
    assert found.class_names == ("Zo\u00eb", "x")
    assert found.labels_N.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["file,label", "a.jpg,x", "gone.jpg,y"], r"line 3: 'gone\.jpg' does not exist below dataset\.path=.*pile"),
        (["file,label", "a.jpg,x", "b.jpg,y", "sub/../a.jpg,y"], r"line 4: 'a\.jpg' is in line 2 already"),
        (["file,label", "a.jpg,x", "b.jpg,"], r"line 3: no label for 'b\.jpg'"),
        (["file,label", "a.jpg,x", "b.jpg"], r"line 3: no label for 'b\.jpg'"),
        (["file,label", "a.jpg,x", ",y"], "line 3: no file"),
        (["file,label", "a.jpg,x", f"{'b' * 5000}.jpg,y"], "line 3: 'b+.jpg' does not exist"),
        (["file,label", "a.jpg,x", "../b.jpg,y"], r"line 3: '\.\./b\.jpg' is outside dataset\.path=.*pile"),
        (["file,label", "a.jpg,x", "/etc/passwd,y"], r"line 3: '/etc/passwd' is outside dataset\.path=.*pile"),
        (["file,label,split", "a.jpg,x,train", "b.jpg,y,val"], r"line 3: split 'val' of 'b\.jpg' is neither train nor"),
        (["file,label,split", "a.jpg,x,train", "b.jpg,y"], r"line 3: split '' of 'b\.jpg'"),
        (["file,label,split", "a.jpg,x,train", "b.jpg,y,train"], r"every row has split train\. Leave the column out"),
        (["name,label", "a.jpg,x"], r"has no column file\. Its first line names name, label\. It must name file,label"),
        (["file|label", "a.jpg|x"], "no column file and no column label"),
        (["sep=;", "file;label", "a.jpg;x", "gone.jpg;y"], r"line 4: 'gone\.jpg' does not exist"),
        (["file,label"], "holds no row below its header"),
        ([""], "Its first line names nothing"),
        (["file,label", "a.jpg,x", "b.jpg,x"], r"holds one class, x\. At least two"),
        (["file,label", "a.jpg,1", "b.jpg,2"], r"class indices 0 \.\. 2, but 1 of these do not occur"),
        (["file,label", "a.jpg,-1", "b.jpg,0"], "label -1 is not a class index from 0"),
        (["file,label", *(f"{n}.jpg,x" for n in range(9))], r"line 2: .*line 6: .*and 4 more"),
    ],
)
def test_csv_faults_name_file_and_line(pile, lines, message):
    refused(write_csv(pile, *lines), rf"labels\.csv.*{message}", labels_csv="labels.csv")


def test_csv_integers_within_a_stated_number_of_classes(pile):
    write_csv(pile, "file,label", "a.jpg,0", "b.jpg,3")
    assert len(config(pile, labels_csv="labels.csv", n_classes=5).images().class_names) == 5
    refused(
        pile, r"label 3 is not a class index from 0 below dataset\.n_classes=3", labels_csv="labels.csv", n_classes=3
    )


def test_csv_that_is_not_there_or_not_text(pile):
    with pytest.raises(DataError, match=r"dataset\.labels_csv=gone\.csv is not a file \(looked for .*pile/gone\.csv"):
        config(pile, labels_csv="gone.csv").source_files()
    (pile / "labels.csv").write_bytes(os.urandom(50) + b"\xff\xfe\0")
    refused(pile, "cannot be read .*Write it as CSV in UTF-8", labels_csv="labels.csv")
