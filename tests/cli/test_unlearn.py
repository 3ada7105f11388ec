"""The command sfu-unlearn: what it reads and writes, how it ends, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import sfu
from sfu.heads.forgotten import Forgotten
from sfu.records.record import read_deletion_record
from sfu.records.training import TrainingFile
from tests.records.cases import (
    everything,
    message_of,
    run,
    state,
    write_head,
    write_model,
    write_rows,
    write_training,
)
from tests.unlearning.cases import rows, trained

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_without_apply_it_says_what_it_would_do_and_writes_nothing(tmp_path, capsys, monkeypatch):
    write_head(tmp_path), write_rows(tmp_path / "gone.npz")
    monkeypatch.chdir(tmp_path)
    before = everything(tmp_path)
    assert run("old", "gone.npz", "--out", "new", "--record", "copy.json") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"^verdict +would be applied$", shown, re.M)
    features, labels = rows()
    result = sfu.unlearn(trained(), features[:40], labels[:40])
    assert result.predicted_share_interval is not None
    low, high = result.predicted_share_interval
    text = f"{result.predicted_share:.0%} of the squared distance to retraining is gone ({low:.0%} to {high:.0%},"
    assert text in " ".join(shown.split())
    assert f"a distance of {result.predicted_distance:.2f} is left" in " ".join(shown.split())
    assert shown.endswith("Nothing was written (no --apply).\n")
    assert everything(tmp_path) == before
    assert not list(tmp_path.glob(".*"))


def test_apply_writes_the_head_that_unlearn_returns_and_a_record(tmp_path, capsys):
    head, gone, new = write_head(tmp_path), write_rows(tmp_path / "gone.npz"), tmp_path / "new"
    before = everything(tmp_path)
    assert run(head, gone, "--out", str(new), "--apply", "--seed", "3", "--record", str(tmp_path / "copy.json")) == 0
    shown = capsys.readouterr().out
    features, labels = rows()
    result = sfu.unlearn(trained(), features[:40], labels[:40], seed=3)
    made = sfu.load_head(new / "head")
    assert torch.equal(made.parameters_CE, result.head.parameters_CE)
    assert (made.n_train, made.forgotten.rows, made.forgotten.requests) == (360, 40, 1)
    assert stat.S_IMODE((new / "head.secret").stat().st_mode) == 0o600
    record = read_deletion_record(new / "record-1.json")
    assert shown.splitlines()[-1] == record.hash
    assert (record.number, record.previous, record.event, record.layer) == (1, None, "request", None)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in everything(tmp_path).items()}
    assert record.before.model_dump() == {
        "tensors": digests["old.safetensors"], "settings": digests["old.json"], "secret": digests.get("old.secret"),
        "model": None,
    }  # fmt: skip
    assert record.after.model_dump() == {
        "tensors": digests["new/head.safetensors"], "settings": digests["new/head.json"],
        "secret": digests["new/head.secret"], "model": None,
    }  # fmt: skip
    assert record.text == digests["new/record-1.md"]
    assert (tmp_path / "copy.json").read_bytes() == (new / "record-1.json").read_bytes()
    assert record.asked.model_dump() == {
        "kind": "random", "files": 1, "rows": 40, "unlabelled": [], "seed": 3, "copies": False, "on_doubt": "withhold",
    }  # fmt: skip
    assert (record.done.verdict, record.done.rows, record.done.n_train) == ("applied", 40, (400, 360))
    assert record.estimated.share == result.predicted_share
    assert record.estimated.share_interval == result.predicted_share_interval
    assert record.estimated.distance == result.predicted_distance
    assert (record.estimated.l2, record.estimated.l2_interval) == (1e-2, None)
    # the digests are those of the rows, under the key that the secret file holds
    keyed = Forgotten(key=made.forgotten.key).after(features[:40], labels[:40])
    assert record.done.row_digests == sorted(one.hex() for one in keyed.digests)
    assert made.forgotten.key is not None
    assert made.forgotten.key.hex() not in (new / "record-1.json").read_text()
    assert {name: content for name, content in everything(tmp_path).items() if name in before} == before


def test_the_page_for_a_person_says_what_was_asked_done_and_not_touched(tmp_path):
    head, gone, new = write_head(tmp_path), write_rows(tmp_path / "gone.npz"), tmp_path / "new"
    assert run(head, gone, "--out", str(new), "--apply") == 0
    record, text = read_deletion_record(new / "record-1.json"), (new / "record-1.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings == [
        "What was asked", "What was done", "What is certain", "What is estimated", "What was not touched",
        "How to check this record",
    ]  # fmt: skip
    assert "40 training rows" in text
    assert "counted 400 training rows before, and counts 360 now" in text
    assert f"- {100 * record.estimated.share:.0f} % of the squared distance" in text
    assert record.after.tensors in text
    for sentence in record.not_touched:
        assert f"- {sentence}" in text
    assert any("`sfu-unlearn purge` removes" in sentence for sentence in record.not_touched)
    for digest in record.done.row_digests:
        assert digest not in text


def test_a_step_that_is_withheld_exits_with_3_and_writes_nothing(tmp_path, capsys):
    features, labels = rows()
    chosen = labels == 2
    gone = write_rows(tmp_path / "gone.npz", features=features[chosen].numpy(), labels=labels[chosen].numpy())
    model, training = write_model(tmp_path / "m.safetensors"), write_training(tmp_path / "t.json")
    given = (model, gone, "--layer", "fc", "--training", training, "--request", "class", "--out", str(tmp_path / "new"))
    before = everything(tmp_path)
    for applied in ((), ("--apply",)):
        assert run(*given, *applied) == 3
        shown = capsys.readouterr().out
        assert re.search(r"^verdict +withheld$", shown, re.M)
        assert shown.endswith("Nothing was written, because the step is withheld.\n")
        assert everything(tmp_path) == before
    assert run(*given, "--apply", "--on-doubt", "apply") == 0
    record = read_deletion_record(tmp_path / "new" / "record-1.json")
    assert (record.done.verdict, record.asked.on_doubt) == ("applied_with_reservations", "apply")
    assert "forced" in record.done.reasons
    text = (tmp_path / "new" / "record-1.md").read_text()
    assert "It was forced (--on-doubt apply)." in text
    assert "- `forced`: The step was applied although" in text


def test_requests_one_after_another_make_a_chain(tmp_path, capsys):
    first, second = write_rows(tmp_path / "a.npz", 0, 40), write_rows(tmp_path / "b.npz", 30, 70)
    new, newer = tmp_path / "new", tmp_path / "newer"
    assert run(write_head(tmp_path), first, "--out", str(new), "--apply") == 0
    assert run(str(new), second, "--out", str(newer), "--apply") == 0
    assert run(str(new), second, "--in-place", "--apply") == 0
    old = read_deletion_record(newer / "record-1.json")
    for folder in (new, newer):
        record = read_deletion_record(folder / "record-2.json")
        assert read_deletion_record(folder / "record-1.json") == old
        assert (folder / "record-1.md").exists()
        assert (record.previous, record.before, record.number) == (old.hash, old.after, 2)
        assert (record.asked.rows, record.done.rows, record.done.n_train) == (40, 30, (360, 330))
        assert record.done.earlier_requests == 0
        assert len(record.done.row_digests) == 30
        assert sfu.load_head(folder / "head").forgotten.requests == 2
        assert "10 rows had been forgotten before, or were given twice." in (folder / "record-2.md").read_text()
    # the same requests again, here and there: nothing is left to do, and nothing is written
    before = everything(tmp_path)
    capsys.readouterr()
    for given in ((str(new), second, "--in-place"), (str(new), first, "--out", str(tmp_path / "third"))):
        assert run(*given, "--apply") == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "all rows had been forgotten before. There is nothing left to do." in shown
    assert everything(tmp_path) == before
    assert not [path for path in tmp_path.glob(".*") if path.suffix != ".lock"]


def test_a_command_that_is_given_again_after_it_was_served_does_nothing(tmp_path, capsys):
    model, training = write_model(tmp_path / "m.safetensors"), write_training(tmp_path / "t.json")
    gone, copy = write_rows(tmp_path / "gone.npz"), tmp_path / "copy.json"
    given = (model, gone, "--layer", "fc", "--training", training, "--out", str(tmp_path / "new"), "--apply")
    assert run(*given) == 0
    before = everything(tmp_path)
    assert run(*given) == 0
    assert "There is nothing left to do." in capsys.readouterr().out
    assert everything(tmp_path) == before
    assert run(*given, "--record", str(copy)) == 0  # as if it had been stopped before the copy
    assert copy.read_bytes() == (tmp_path / "new" / "record-1.json").read_bytes()
    other = write_rows(tmp_path / "other.npz", 40, 80)
    another = write_model(tmp_path / "another.safetensors", {**state(), "body.steps": torch.tensor(8)})
    for head, wanted in ((model, other), (another, gone)):
        assert run(head, wanted, *given[2:]) == 2
        assert "new exists and was made by another request" in message_of(capsys)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checkpoint_keeps_dtype_and_every_other_tensor(tmp_path, name, dtype):
    model, training = write_model(tmp_path / name, state(dtype)), write_training(tmp_path / "t.json")
    gone, new = write_rows(tmp_path / "gone.npz"), tmp_path / "new"
    assert run(model, gone, "--layer", "fc", "--training", training, "--out", str(new), "--apply") == 0
    read = load_file if name.endswith("s") else (lambda path: torch.load(path, weights_only=True))
    found, given = read(new / name), state(dtype)
    assert list(found) == list(read(model))
    for key in ("body.weight", "body.steps"):
        assert found[key].dtype == given[key].dtype
        assert found[key].flatten().view(torch.uint8).tolist() == given[key].flatten().view(torch.uint8).tolist()
    features, labels = rows()
    layer = torch.nn.Linear(12, 4, bias=False, dtype=dtype)
    layer.weight.data = given["fc.weight"]
    loss = sfu.make_loss("quadratic", target_scale=1.0)
    result = sfu.unlearn(sfu.LinearHead.from_module(layer, l2=1e-2, n_train=400, loss=loss), features[:40], labels[:40])
    assert found["fc.weight"].dtype == dtype
    assert torch.equal(found["fc.weight"], result.head.parameters_CE.to(dtype))
    assert not torch.equal(found["fc.weight"], given["fc.weight"])
    assert torch.equal(sfu.load_head(new / "head").parameters_CE, result.head.parameters_CE)
    record = read_deletion_record(new / "record-1.json")
    change, exact = (
        float((one.double() - given["fc.weight"].double()).norm()) for one in (result.head.parameters_CE,) * 2
    )
    lost = float((found["fc.weight"].double() - result.head.parameters_CE).norm()) / change
    assert record.done.rounded == pytest.approx(lost)
    assert (record.layer, exact > 0) == ("fc", True)
    assert record.after.model == hashlib.sha256((new / name).read_bytes()).hexdigest()
    # a later request starts from the head, which was not rounded, and needs no layer or training
    more = write_rows(tmp_path / "more.npz", 40, 80)
    assert run(str(new), more, "--in-place", "--apply") == 0
    later = sfu.unlearn(result.head, features[40:80], labels[40:80]).head.parameters_CE
    assert torch.equal(read(new / name)["fc.weight"], later.to(dtype))
    assert read_deletion_record(new / "record-2.json").layer == "fc"


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_a_convolution_of_one_pixel_is_a_linear_layer(tmp_path, name):
    training, gone = write_training(tmp_path / "t.json"), write_rows(tmp_path / "gone.npz")
    found = {}
    for kind, shape in (("linear", (4, 12)), ("convolution", (4, 12, 1, 1))):
        (tmp_path / kind).mkdir()
        model = write_model(tmp_path / kind / name, {**state(), "fc.weight": state()["fc.weight"].reshape(shape)})
        new = tmp_path / kind / "new"
        assert run(model, gone, "--layer", "fc", "--training", training, "--out", str(new), "--apply") == 0
        read = load_file if name.endswith("s") else torch.load
        found[kind] = read(new / name)["fc.weight"]
        assert found[kind].shape == shape
    assert torch.equal(found["convolution"].flatten(), found["linear"].flatten())


def test_a_step_that_rounding_undoes_has_a_reservation(tmp_path, capsys):
    gone, training = write_rows(tmp_path / "gone.npz", 0, 6), write_training(tmp_path / "t.json", bound=30.0)
    given = (gone, "--layer", "fc", "--training", training)
    model = write_model(tmp_path / "m.safetensors", state(torch.bfloat16))
    assert run(model, *given) == 0
    assert re.search(r"^verdict +would be applied with reservations$", capsys.readouterr().out, re.M)
    assert run(model, *given, "--out", str(tmp_path / "new"), "--apply") == 0
    record = read_deletion_record(tmp_path / "new" / "record-1.json")
    assert record.done.rounded is not None
    assert record.done.rounded > 0.1
    assert record.done.verdict == "applied_with_reservations"
    assert record.done.reasons[-1] == "rounding"
    told = f"rounding to bfloat16 moves the weights by {record.done.rounded:.0%} of the step"
    assert record.done.note is not None
    assert told in record.done.note
    assert run(write_model(tmp_path / "f.safetensors"), *given, "--out", str(tmp_path / "newer"), "--apply") == 0
    assert "rounding" not in read_deletion_record(tmp_path / "newer" / "record-1.json").done.reasons


def test_the_rest_of_a_checkpoint_stays_as_it_is(tmp_path):
    training, gone = write_training(tmp_path / "t.json"), write_rows(tmp_path / "gone.npz")
    given = (gone, "--layer", "fc", "--training", training, "--apply", "--out")
    content = {"epoch": 3, "model": state(), "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "lr": [0.1]}}
    assert run(write_model(tmp_path / "a.ckpt", content), *given, str(tmp_path / "a")) == 0
    found = torch.load(tmp_path / "a" / "model.pt", weights_only=True)
    assert (found["epoch"], found["optimizer"]["lr"]) == (3, [0.1])
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], torch.ones(3))
    assert not torch.equal(found["model"]["fc.weight"], state()["fc.weight"])
    path = tmp_path / "b.safetensors"
    assert run(write_model(path), *given, str(tmp_path / "b")) == 0
    old, new = path.read_bytes(), (tmp_path / "b" / "model.safetensors").read_bytes()
    size = 8 + int.from_bytes(old[:8], "little")
    assert (len(old), old[:size]) == (len(new), new[:size])
    with safe_open(tmp_path / "b" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def _tied():
    content = state()
    return {**content, "embedding.weight": content["fc.weight"]}


CHECKPOINTS = {
    "a missing layer": (state(), "head", r"has no layer head\. .* are body \(12 x 12\), fc \(4 x 12\)"),
    "no linear layer": ({"a": torch.ones(3)}, "fc", r"has no layer fc\. It has no linear layer\."),
    "pickle": (
        {"fc.weight": torch.ones(4, 12), "x": Evil()}, "fc",
        r"more than tensors \(.*system\), which sfu never unpickles\)\. Save",
    ),
    "no tensors": ([1, 2], "fc", r"it holds no tensors by name"),
    "two copies": ({"model": state(), "ema": state()}, "fc", r"holds the layer fc 2 times, in model and ema\."),
    "tied": (_tied(), "fc", r"has one memory for fc\.weight and embedding\.weight"),
    "a parametrisation": (
        {"fc.weight_g": torch.ones(4, 1), "fc.weight_v": torch.ones(4, 12)}, "fc",
        r"holds weight_g, weight_v under fc, not weight and bias alone\..* remove parametrisations",
    ),
    "an adapter": (
        {"fc.weight": torch.ones(4, 12), "fc.lora_A": torch.ones(2, 12)}, "fc", r"lora_A, weight under fc, .*Merge",
    ),
    "NaN": ({"fc.weight": torch.full((4, 12), torch.nan)}, "fc", r"fc\.weight has NaN or infinite values"),
    "whole numbers": ({"fc.weight": torch.ones(4, 12, dtype=torch.int8)}, "fc", r"fc\.weight is int8"),
    "a convolution": ({"fc.weight": torch.ones(4, 12, 3, 3)}, "fc", r"which is no linear layer"),
    "another bias": ({"fc.weight": torch.ones(4, 12), "fc.bias": torch.ones(3)}, "fc", r"fc\.bias \[3\], which is no"),
    "two dtypes": (
        {"fc.weight": torch.ones(4, 12), "fc.bias": torch.ones(4).half()}, "fc", r"have different dtypes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoints_that_cannot_be_changed_are_refused(tmp_path, capsys, monkeypatch, case):
    content, layer, message = CHECKPOINTS[case]
    monkeypatch.chdir(tmp_path)
    model, gone = write_model(tmp_path / "m.pt", content), write_rows(tmp_path / "gone.npz")
    training = write_training(tmp_path / "t.json")
    before = everything(tmp_path)
    assert run(model, gone, "--layer", layer, "--training", training, "--out", "new", "--apply") == 2
    assert re.search(message, message_of(capsys))
    assert everything(tmp_path) == before


def test_old_checkpoints_are_read_and_damaged_ones_refused(tmp_path, capsys):
    gone, training = write_rows(tmp_path / "gone.npz"), write_training(tmp_path / "t.json")
    torch.save(state(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    given = (gone, "--layer", "fc", "--training", training, "--out", str(tmp_path / "new"), "--apply")
    assert run(str(tmp_path / "old.pt"), *given) == 0
    assert torch.equal(torch.load(tmp_path / "new" / "model.pt")["body.weight"], state()["body.weight"])
    capsys.readouterr()
    for name in ("cut.safetensors", "cut.pt"):
        (tmp_path / name).write_bytes(Path(write_model(tmp_path / f"m{name[3:]}")).read_bytes()[:-5])
        assert run(str(tmp_path / name), *given[:-3]) == 2
        assert "cannot be read" in message_of(capsys)


MISTAKES = {
    "no such rows": (["HEAD", "none.npz"], r"FORGET none\.npz is no file"),
    "a table": (["HEAD", "rows.csv"], r"FORGET rows\.csv ends in '\.csv'.*numpy\.savez.*or as Parquet"),
    "no such head": (["none", "ROWS"], r"there is no head at none .*Give the path"),
    "a model without its layer": (["MODEL", "ROWS"], r"no head of sfu.*give --layer and --training.*fc \(4 x 12\)"),
    "a layer alone": (["MODEL", "ROWS", "--layer", "fc"], r"--layer is given without --training"),
    "a training alone": (["MODEL", "ROWS", "--training", "t.json"], r"--training is given without --layer"),
    "nowhere to write": (["HEAD", "ROWS", "--apply"], r"--apply needs a place to write to"),
    "both places": (["HEAD", "ROWS", "--out", "new", "--in-place"], r"Give one of them"),
    "a head in place": (["HEAD", "ROWS", "--in-place", "--apply"], r"--in-place replaces a folder"),
    "a place that is taken": (["HEAD", "ROWS", "--out", "t.json", "--apply"], r"--out t\.json exists"),
    "a record that is taken": (["HEAD", "ROWS", "--record", "t.json"], r"--record t\.json exists"),
    "a seed below 0": (["HEAD", "ROWS", "--seed", "-1"], r"--seed -1 is below 0"),
    "narrow unlabelled rows": (["HEAD", "ROWS", "--unlabelled", "narrow.npz"], r"--unlabelled narrow\.npz: .* 5 wide"),
    "no such unlabelled rows": (["HEAD", "ROWS", "--unlabelled", "none.npz"], r"--unlabelled none\.npz is no file"),
    "no labels": (["HEAD", "unlabelled.npz"], r"FORGET=unlabelled\.npz has no 'labels', but 'features'\."),
    "NaN": (["HEAD", "nan.npz"], r"NaN or infinite values in 1 of 40 rows"),
    "another width": (["HEAD", "narrow.npz"], r"5 wide but the head takes 12"),
    "an unknown label": (["HEAD", "strange.npz"], r"labels run from 0 to 9, but the head has classes 0 \.\. 3"),
    "pickled rows": (["HEAD", "pickled.npz"], r"sfu never loads pickled objects"),
    "no JSON": (["MODEL", "ROWS", "--layer", "fc", "--training", "ROWS"], r"docs/records\.md lists"),
    "an unknown key": (["MODEL", "ROWS", "--layer", "fc", "--training", "typo.json"], r"n_trian=400: Extra inputs"),
    "an unknown loss": (["MODEL", "ROWS", "--layer", "fc", "--training", "loss.json"], r"loss"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features, _ = rows()
    spoilt = features[:40].clone()
    spoilt[3, 2] = torch.nan
    write_rows(tmp_path / "nan.npz", features=spoilt.numpy())
    write_rows(tmp_path / "narrow.npz", features=features[:40, :5].numpy())
    write_rows(tmp_path / "strange.npz", labels=np.array([0, 9] * 20))
    write_rows(tmp_path / "unlabelled.npz", labels=None)
    write_rows(tmp_path / "pickled.npz", labels=np.array(["a", None] * 20, object))
    (tmp_path / "rows.csv").write_bytes(b"PAR1")
    write_training(tmp_path / "t.json")
    write_training(tmp_path / "typo.json", n_trian=400)
    write_training(tmp_path / "loss.json", loss="cross")
    return tmp_path


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_exit_with_2_and_say_what_to_do(folder, capsys, case):
    places = {
        "HEAD": write_head(folder), "ROWS": write_rows(folder / "gone.npz"),
        "MODEL": write_model(folder / "model.safetensors"),
    }  # fmt: skip
    arguments, message = MISTAKES[case]
    before = everything(folder)
    assert run(*(places.get(one, one) for one in arguments)) == 2
    said = message_of(capsys)
    assert re.search(message, said), said
    assert everything(folder) == before


def test_a_folder_that_was_changed_is_refused(tmp_path, capsys):
    new = tmp_path / "new"
    gone, more = write_rows(tmp_path / "gone.npz"), write_rows(tmp_path / "more.npz", 40, 80)
    assert run(write_head(tmp_path), gone, "--out", str(new), "--apply") == 0
    about = json.loads((new / "head.json").read_text())
    (new / "head.json").write_text(json.dumps(about | {"n_train": 399}))
    assert run(str(new), more, "--in-place", "--apply") == 2
    assert "is not as sfu-unlearn left it: the settings of the head in" in message_of(capsys)
    (new / "head.json").write_text(json.dumps(about, indent=2) + "\n")
    assert run(str(new), more) == 0
    (new / "record-1.md").write_text("Nothing happened.")
    assert run(str(new), more) == 2
    assert "record-1.md is not the text" in message_of(capsys)
    assert run(str(new), more, "--layer", "fc", "--training", "t.json") == 2
    assert "are known in" in message_of(capsys)
    (new / "head.secret").rename(tmp_path / "away")
    (new / "record-1.md").unlink()
    assert run(str(new), more) == 2
    assert "The secret of the head is not in" in message_of(capsys)
    (new / "record-1.json").unlink()
    assert run(str(new), more) == 2
    assert f"holds a head without a record. Give the head itself, {new / 'head'}." in message_of(capsys)


def test_a_part_of_a_folder_stands_for_the_folder(tmp_path, capsys):
    """Otherwise its chain would begin anew, and rows that were forgotten would be forgotten again."""
    model, training = write_model(tmp_path / "m.safetensors"), write_training(tmp_path / "t.json")
    first, second = write_rows(tmp_path / "a.npz"), write_rows(tmp_path / "b.npz", 40, 80)
    of_layer, new = ("--layer", "fc", "--training", training), tmp_path / "new"
    assert run(model, first, *of_layer, "--out", str(new), "--apply") == 0
    for part in ("head", "head.json", "head.safetensors", "model.safetensors"):
        folder = tmp_path / part
        assert run(str(new / part), second, "--out", str(folder), "--apply") == 0
        assert read_deletion_record(folder / "record-2.json").done.n_train == (360, 320)
    assert run(str(new / "model.safetensors"), second, *of_layer) == 2
    assert "are known in" in message_of(capsys)
    assert run(str(new), second, "--out", str(new), "--apply") == 2
    assert "is HEAD itself. Give --in-place" in message_of(capsys)
    (tmp_path / "link").symlink_to(new)
    assert run(str(tmp_path / "link"), second, "--in-place", "--apply") == 0
    assert (tmp_path / "link").is_symlink()
    assert read_deletion_record(new / "record-2.json").number == 2


def test_what_is_said_of_the_training_decides_the_step(tmp_path, capsys):
    features, labels = rows()
    training = write_training(
        tmp_path / "t.json", l2="estimate", class_counts=labels.bincount().tolist(), classes=["a", "b", "c", "d"],
        feature_mean=features.mean(0).tolist(), frozen_backbone=False,
    )  # fmt: skip
    gone = write_rows(tmp_path / "gone.npz", 0, 160)
    given = (write_model(tmp_path / "m.pt"), gone, "--layer", "fc", "--training", training)
    assert run(*given, "--out", str(tmp_path / "new"), "--apply") == 0
    assert re.search(r"^l2 +\S+ \(\S+ to \S+, estimated\)$", capsys.readouterr().out, re.M)
    record = read_deletion_record(tmp_path / "new" / "record-1.json")
    assert record.estimated.l2_interval is not None
    low, high = record.estimated.l2_interval
    assert low < record.estimated.l2 < high
    assert {"l2_estimated", "trained_backbone"} <= set(record.done.reasons)
    assert "it was trained on these rows, too" in record.not_touched[0]
    names = {one.name for one in fields(sfu.TrainingRecord)} - {"optimizer", "batch_size"}
    assert set(TrainingFile.model_fields) == names | {"bound", "ledger"}


def test_what_contradicts_the_head_is_refused_in_the_words_of_the_command(tmp_path, capsys):
    gone, training = write_rows(tmp_path / "gone.npz", 0, 160), write_training(tmp_path / "t.json", training_loss=1e-9)
    given = (write_model(tmp_path / "m.pt"), gone, "--layer", "fc", "--training", training)
    assert run(*given) == 2
    said = message_of(capsys)
    assert "--request selected" in said
    assert "--on-doubt apply goes on all the same" in said
    assert "curvature" not in said
    assert run(*given, "--on-doubt", "apply") == 0


def test_requests_from_before_the_first_record_are_counted(tmp_path):
    features, labels = rows()
    sfu.unlearn(trained(), features[:40], labels[:40]).head.save(tmp_path / "old")
    new, more = tmp_path / "new", write_rows(tmp_path / "more.npz", 40, 80)
    assert run(str(tmp_path / "old"), more, "--out", str(new), "--apply") == 0
    assert run(str(new), write_rows(tmp_path / "last.npz", 80, 120), "--in-place", "--apply") == 0
    for number in (1, 2):
        assert read_deletion_record(new / f"record-{number}.json").done.earlier_requests == 1
        assert "It had served 1 request without a record." in (new / f"record-{number}.md").read_text()


def test_rows_count_as_often_as_they_are_given_if_asked(tmp_path, capsys):
    features, labels = rows()
    twice = {"features": features[:20].repeat(2, 1).numpy(), "labels": labels[:20].repeat(2).numpy()}
    head, gone = write_head(tmp_path), write_rows(tmp_path / "gone.npz", **twice)
    assert run(head, gone) == 0
    assert "count once (--copies counts them all)" in " ".join(capsys.readouterr().out.split())
    assert run(head, gone, "--copies", "--out", str(tmp_path / "new"), "--apply") == 0
    record = read_deletion_record(tmp_path / "new" / "record-1.json")
    assert (record.asked.copies, record.done.rows) == (True, 40)


def test_other_heads_are_refused(tmp_path, capsys, monkeypatch):
    head, gone = write_head(tmp_path), write_rows(tmp_path / "gone.npz")
    monkeypatch.setattr("sfu.heads.linear.LinearHead.feature_weights_CD", None)  # as of a linearised head
    assert run(head, gone) == 2
    assert "sfu-unlearn serves linear heads, whose rows are features" in message_of(capsys)


def test_mistakes_in_the_arguments_are_told_without_pytorch(folder):
    write_head(folder)
    code = (
        "import sys, json, contextlib\nfrom sfu.cli.unlearn import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    with contextlib.suppress(SystemExit): main(arguments)\n"
        "print([name for name in ('torch', 'hydra') if name in sys.modules])"
    )
    given = [
        ["--help"], ["verify", "--help"], ["old", "none.npz"], ["old", "nan.npz", "--in-place"], ["none", "nan.npz"],
        ["old", "nan.npz", "--layer", "fc", "--training", "typo.json"], ["verify", "none"],
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(given)], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert len(done.stderr.splitlines()) == 5


def test_it_runs_from_another_folder_with_paths_from_there(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_head(tmp_path), write_rows(tmp_path / "gone.npz")
    command = [sys.executable, "-m", "sfu.cli.unlearn", "../old", "../gone.npz", "--out", "../made/new", "--apply"]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sfu.load_head(tmp_path / "made" / "new" / "head").n_train == 360
    assert not list(elsewhere.iterdir())
