"""A head remembers how much was forgotten from it, and its owner can tell which rows, through its files."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import sfu
from sfu.errors import ArtifactError
from sfu.files import file_digest
from sfu.heads.files import load_head
from sfu.heads.forgotten import Forgotten
from sfu.heads.linear import LinearHead
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_like

ROWS, LABELS = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 1, 0])


def head_after(*requests: slice) -> LinearHead:
    forgotten = Forgotten().keyed()
    for rows in requests:
        forgotten = forgotten.after(ROWS[rows], LABELS[rows])
    return LinearHead(torch.ones(2, 3), torch.zeros(2, 3), 0.1, 50, forgotten=forgotten)


def test_rows_are_recognised_whatever_their_number_type_and_no_others():
    forgotten = Forgotten().keyed().after(ROWS[:2], LABELS[:2])
    assert (forgotten.requests, forgotten.rows, len(forgotten.digests)) == (1, 2, 2)
    for rows in (ROWS, ROWS.double(), ROWS.bfloat16(), ROWS.long(), torch.where(ROWS == 0, -0.0, ROWS)):
        assert forgotten.new_rows(rows, LABELS.int()).tolist() == [2, 3]
    assert forgotten.new_rows(ROWS, 1 - LABELS).tolist() == [0, 1, 2, 3]
    assert forgotten.new_rows(ROWS + 1e-6, LABELS).tolist() == [0, 1, 2, 3]
    many, labels = torch.arange(3000.0).reshape(1500, 2), torch.zeros(1500, dtype=torch.int64)
    after = forgotten.after(many[:1400], labels[:1400])
    assert after.new_rows(many, labels).tolist() == list(range(1400, 1500))
    assert after.new_rows(ROWS, LABELS).tolist() == [2, 3]


def test_rows_with_targets_are_recognised_by_all_of_them():
    targets = torch.tensor([[1.0, 0, 0], [1, 1, 0], [0.5, 0.5, 0], [0, 0, 0]])
    forgotten = Forgotten().keyed().after(ROWS, targets)
    assert len(forgotten.digests) == 4
    assert forgotten.new_rows(ROWS, targets.double()).tolist() == []
    assert forgotten.new_rows(ROWS, torch.tensor([0, 0, 0, 0])).tolist() == [1, 2, 3]  # 0 is the one-hot row of class 0
    assert forgotten.new_rows(ROWS, torch.eye(3)[[0, 0, 0, 0]]).tolist() == [1, 2, 3]
    assert forgotten.new_rows(ROWS, targets + torch.tensor([[0.0], [0], [0], [1e-9]]).double()).tolist() == [3]
    one = Forgotten().keyed().after(ROWS, torch.tensor([[1.0], [0], [2], [-0.5]]))
    assert one.new_rows(ROWS, torch.tensor([[0.0], [1], [2], [-0.5]])).tolist() == [0, 1]


def test_a_head_that_is_saved_and_loaded_keeps_its_memory(tmp_path):
    head = head_after(slice(0, 1), slice(1, 3))
    paths = head.save(tmp_path / "head")
    back = load_head(tmp_path / "head")
    assert back.forgotten == head.forgotten
    assert back.forgotten.new_rows(ROWS, LABELS).tolist() == [3]
    assert [path.suffix for path in paths] == [".safetensors", ".json", ".secret"]
    assert json.loads(paths[1].read_text())["forgotten"] == {
        "requests": 2, "rows": 3, "ledger": False, "removed": None,
    }  # fmt: skip
    paths[2].unlink()  # as it is published
    published = load_head(tmp_path / "head")
    assert published.forgotten == Forgotten(2, 3)
    assert published.forgotten.keyed().new_rows(ROWS, LABELS).tolist() == [0, 1, 2, 3]


def test_digests_say_nothing_without_the_key_and_two_heads_have_two_keys():
    first, second = (head_after(slice(0, 4)).forgotten for _ in range(2))
    assert first.digests.isdisjoint(second.digests)
    assert len(first.key) == 64
    for text in (repr(first), repr(head_after(slice(0, 1)))):
        assert "digests" not in text
        assert "key" not in text


def test_a_head_that_is_trained_again_has_forgotten_nothing():
    settings = LinearSettings(l2=0.1)
    assert train_like(head_after(slice(0, 2)), ROWS, LABELS, settings, seed=0).forgotten == Forgotten()


def test_rows_that_are_only_counted_leave_no_secret(tmp_path):
    counted = Forgotten().after(ROWS, LABELS)
    assert counted == Forgotten(1, 4)
    head = LinearHead(torch.ones(2, 3), torch.zeros(2, 3), 0.1, 50, forgotten=counted)
    assert len(head.save(tmp_path / "head")) == 2
    assert load_head(tmp_path / "head").forgotten == counted


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_of_before_there_was_a_memory_has_none(tmp_path, version):
    _, settings, *_ = LinearHead(torch.ones(2, 3), torch.zeros(2, 3), 0.1, 50).save(tmp_path / "head")
    about = json.loads(settings.read_text())
    del about["forgotten"]
    settings.write_text(json.dumps(about | {"schema": version}))
    assert load_head(tmp_path / "head").forgotten == Forgotten()


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"requests": -1, "rows": 3}, r"forgotten\.requests=-1"),
        ({"requests": 1}, r"forgotten\.rows: Field required"),
        ([], "forgotten"),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path, about, message):
    _, settings, _ = head_after(slice(0, 1)).save(tmp_path / "head")
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"forgotten": about}))
    with pytest.raises(ArtifactError, match=message):
        load_head(tmp_path / "head")


@pytest.mark.parametrize(
    "change",
    [
        {"forgotten_digests": torch.zeros(2, 15, dtype=torch.uint8)},
        {"forgotten_digests": torch.zeros(2, 16)},
        {"forgotten_key": torch.zeros(65, dtype=torch.uint8)},
        {"forgotten_key": torch.zeros(0, dtype=torch.uint8)},
        {"forgotten_digests": None},
    ],
    ids=str,
)
def test_damaged_digests_are_refused(tmp_path, change):
    tensors, _, secret = head_after(slice(0, 2)).save(tmp_path / "head")
    found = load_file(secret) | change
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(kept, secret, {"head": file_digest(tensors)})
    with pytest.raises(ArtifactError, match=r"forgotten_(key|digests)"):
        load_head(tmp_path / "head")


def test_a_file_of_before_there_were_predictions_predicts_from_its_first_request_on(tmp_path):
    head = sfu.fit(torch.randn(60, 4), torch.arange(60) % 3, l2=0.1, loss="quadratic")
    head.save(tmp_path / "head")
    path = tmp_path / "head.json"
    about = json.loads(path.read_text())
    del about["forgotten"]["removed"]
    path.write_text(json.dumps(about))
    assert sfu.load_head(tmp_path / "head").forgotten.removed == (0, 0, 0)
    for wrong in ([0, 0, 1e9], [3, 2, 1]):
        path.write_text(json.dumps(about | {"forgotten": {"requests": 1, "rows": 5, "removed": wrong}}))
        with pytest.raises(ArtifactError, match="removed"):
            sfu.load_head(tmp_path / "head")
