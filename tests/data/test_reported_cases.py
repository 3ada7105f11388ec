"""What people report in public threads about loaders of image folders; each case names its thread on GitHub."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sfu.data.datasets.image_folder import ImageFolder
from sfu.data.images.decode import ImageError, decode_image
from sfu.errors import DataError
from tests.data.image_samples import jpeg, write_classes, write_folder


def names(folder: Path, **settings: object) -> list[str]:
    found = ImageFolder(path=str(folder), **settings).images()
    return [str(path.relative_to(folder)) for path in found.images.paths]


@pytest.mark.parametrize(
    "litter",
    [
        pytest.param("ant/0.jpg:Zone.Identifier", id="ShivamShrirao/diffusers#67"),
        pytest.param("__MACOSX/ant/x.jpg", id="udacity/deep-learning-v2-pytorch#217"),
        pytest.param("ant/@eaDir/0.jpg/SYNOFILE_THUMB.jpg", id="immich-app/immich#30690"),
        pytest.param(".ipynb_checkpoints/0-checkpoint.jpg", id="pytorch/vision#2831"),
        pytest.param("bee/.DS_Store", id="pytorch/vision#109"),
    ],
)
def test_what_systems_leave_behind_is_no_image_and_no_class(tmp_path, caplog, litter):
    folder = write_folder(write_classes(tmp_path, ("ant", "bee"), 2), [litter])
    assert names(folder) == ["ant/0.jpg", "ant/1.jpg", "bee/0.jpg", "bee/1.jpg"]
    assert not caplog.text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "but a pointer of Git LFS",
            id="micasense/imageprocessing#161",
        ),
        pytest.param(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "but HEIC, AVIF or a video, whatever its name .convert",
                     id="python-pillow/Pillow#2806"),
        pytest.param(b"\n<!DOCTYPE html>\n<html>", "but a web page or XML", id="taw/magic-search-engine#126"),
        pytest.param(b"error code: 502", "but text that begins with 'error code: 502'", id="tonquer/JMComic-qt#185"),
        pytest.param(b"", "is empty", id="urw7rs/diffusion-models-made-easy#24"),
        pytest.param(jpeg()[:-200], "is damaged .*(?i:truncated)", id="pytorch/vision#138"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_image_is_called_what_it_is(data, message):
    with pytest.raises(ImageError, match=message):
        decode_image(data)


def test_photos_of_phones_with_several_pictures_give_the_first():
    """python-pillow/Pillow#1138: a JPEG that Pillow takes for MPO."""
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    file = io.BytesIO()
    first = Image.fromarray(pixels)
    first.save(file, "MPO", save_all=True, append_images=[first.resize((3, 3))], quality=100, subsampling=0)
    assert Image.open(io.BytesIO(file.getvalue())).format == "MPO"
    found = decode_image(file.getvalue()).permute(1, 2, 0).numpy()
    assert found.shape == pixels.shape
    assert np.abs(found.astype(int) - pixels).mean() < 8


def test_a_link_whose_file_was_not_fetched_says_how_to_fetch_it(tmp_path):
    """datalad/datalad#3513."""
    folder = write_classes(tmp_path)
    (folder / "ant" / "9.jpg").symlink_to("../.git/annex/objects/X/Y/SHA256E-s9.jpg")
    with pytest.raises(DataError, match=r"ant/9\.jpg is a link to \.\./\.git/annex.* cannot be read .*`git annex get`"):
        ImageFolder(path=str(folder)).images().images.fingerprint()


def test_a_folder_for_validation_and_images_in_no_class_are_told(tmp_path, caplog):
    """ultralytics/ultralytics#1677, roboflow/roboflow-python#153."""
    for part in ("train", "test", "valid"):
        write_classes(tmp_path / part, per_class=1)
    assert len(names(tmp_path)) == 6
    assert "folders beside train/ and test/ are left out: valid/." in caplog.text
    caplog.clear()
    write_folder(tmp_path, ["loose.jpg", "train/9.png"])
    assert len(names(tmp_path)) == 6
    assert f"images in no class folder are left out: 2 (such as {tmp_path}/loose.jpg). Move them" in caplog.text


def test_a_folder_in_a_folder_as_archives_unpack_it(tmp_path):
    """EdjeElectronics/TensorFlow-Lite-Object-Detection-on-Android-and-Raspberry-Pi#147."""
    write_classes(tmp_path / "photos")
    with pytest.raises(DataError, match=r"holds one class, photos\. .* Did you mean dataset\.path=.*/photos\?"):
        names(tmp_path)


def test_a_test_part_that_lacks_a_class_keeps_the_numbers_of_the_others(tmp_path):
    """ultralytics/ultralytics#13936, huggingface/pytorch-image-models#957."""
    write_classes(tmp_path / "train", ("0", "180", "270", "90"), 1)
    write_classes(tmp_path / "test", ("0", "270", "90"), 1)
    found = ImageFolder(path=str(tmp_path)).images()
    assert found.labels_N.tolist() == [0, 1, 2, 3, 0, 2, 3]
    (tmp_path / "test" / "180").mkdir()
    with pytest.raises(DataError, match=r"test has no image in 180/\. Fill or remove it"):
        names(tmp_path)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["file;label", "a.jpg;x", '"sub/d.jpg";"y; z"'], id="buckets/application#181"),
        pytest.param(["sep=\t", "file\tlabel", "a.jpg\tx", "sub/d.jpg\ty; z"], id="complexlogic/rsgain#56"),
        pytest.param(["label,file", "x,a", "y; z,sub/d"], id="fastai/fastai#253"),
        pytest.param(["id,file,label", "0,./a.jpg,x", "1,sub\\d.jpg,y; z"], id="eclipse-efbt/efbt#994"),
    ],
)
def test_lists_as_spreadsheets_and_competitions_write_them(tmp_path, lines):
    folder = write_folder(tmp_path, ["a.jpg", "sub/d.jpg"])
    (folder / "labels.csv").write_text("\r\n".join(lines), encoding="utf-8-sig")
    found = ImageFolder(path=str(folder), labels_csv="labels.csv").images()
    assert names(folder, labels_csv="labels.csv") == ["a.jpg", "sub/d.jpg"]
    assert found.class_names == ("x", "y; z")


def test_a_name_without_ending_that_two_images_have_is_refused(tmp_path):
    folder = write_folder(tmp_path, ["a.jpg", "a.png", "b.jpg"])
    (folder / "labels.csv").write_text("file,label\na,x\nb,y\n")
    with pytest.raises(DataError, match="line 2: 'a' does not exist"):
        names(folder, labels_csv="labels.csv")
