"""What a result tells a person: verdict, reasons, and words."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

import sfu
from sfu.unlearning.result import REASONS, UnlearningResult
from tests.unlearning.cases import situation

SOURCE = Path(__file__).resolve().parents[2] / "sfu"
CLOSED = {"estimator": "closed_form"}


def unlearned(**changes) -> UnlearningResult:
    request, _, _ = situation(n_forget=120)
    options = {"curvature": CLOSED} | changes
    return sfu.unlearn(options.pop("head", request.head), request.features_FD, request.labels_F, **options)


@pytest.mark.parametrize(
    ("applied", "reasons", "verdict"),
    [
        (True, (), "applied"), (True, ("l2_estimated", "repeated_rows"), "applied"),
        (False, ("already_forgotten",), "applied"), (True, ("already_forgotten",), "applied"),
        (True, ("early_stopped",), "applied_with_reservations"), (False, ("no_gain",), "withheld"),
        (False, ("already_forgotten", "no_gain"), "withheld"), (False, (), "withheld"),
        (False, ("incomplete", "no_gain"), "applied_with_reservations"),
    ],
)  # fmt: skip
def test_the_verdict_follows_from_the_reasons(applied, reasons, verdict):
    request, _, _ = situation()
    result = UnlearningResult(request.head, applied=applied, reasons=reasons)
    assert result.verdict == verdict
    told = " ".join(result.explain().split())
    if (applied, reasons) == (False, ("already_forgotten",)):
        assert "no step was taken now" in told
        assert "predicted" not in told
        return
    assert ("were not forgotten" in told) == (verdict == "withheld")
    assert ("is not predicted" in told) == (verdict != "withheld")
    assert all(REASONS[code] in told for code in reasons)
    assert result.to_dict()["reasons"] == list(reasons)


def test_every_code_has_a_meaning_and_every_meaning_a_code():
    used = set()
    for path in (*(SOURCE / "unlearning").rglob("*.py"), *(SOURCE / "records").glob("*.py")):
        text = path.read_text("utf-8")
        used |= set(re.findall(r"Remark\(\s*\"(\w+)\"", text)) | set(re.findall(r"_Test\(\s*\"(\w+)\"", text))
    evidence = (SOURCE / "curvature" / "evidence.py").read_text("utf-8")
    used |= set(re.findall(r"(?:_Test|Finding)\(\s*\"(\w+)\"", evidence))
    used |= {"already_forgotten", "sequence", "incomplete", "trained_steps", "equal_rows_left"}
    assert used == set(REASONS)


def test_requests_get_the_codes_that_fit():
    request, _, _ = situation(n_forget=120)
    plain = unlearned()
    assert (plain.verdict, plain.reasons) == ("applied", ())
    again = sfu.unlearn(plain.head, request.features_FD, request.labels_F, curvature=CLOSED)
    assert (again.verdict, again.reasons, again.applied) == ("applied", ("already_forgotten",), False)
    twice = sfu.unlearn(request.head, request.features_FD.repeat(2, 1), request.labels_F.repeat(2), curvature=CLOSED)
    assert (twice.verdict, twice.reasons) == ("applied", ("repeated_rows",))
    assert unlearned(request="selected").reasons == ("not_random",)
    assert unlearned(noise_sigma=1e3).reasons == ("no_gain",)
    assert unlearned(noise_sigma=1e3).verdict == "withheld"
    assert unlearned(request="person", curvature={**CLOSED, "on_doubt": "apply"}).reasons == ("forced",)
    assert unlearned(batches=2).reasons == ("sequence",)
    recipe = dataclasses.replace(request.head.recipe, trained="early_stopped", frozen_backbone=False)
    stopped = unlearned(head=dataclasses.replace(request.head, recipe=recipe))
    assert stopped.reasons == ("early_stopped", "trained_backbone")
    assert stopped.note.endswith("only the head forgets")
    unbounded = dataclasses.replace(request.head, kept=sfu.Kept())
    assert unlearned(head=unbounded, request="selected").reasons == ("unbounded",)


def test_a_result_can_be_told_shown_and_written_down():
    result = unlearned()
    about = json.loads(json.dumps(result.to_dict()))
    assert about["verdict"] == "applied"
    assert about["rows_forgotten"] == 120
    low, high = about["predicted_share_interval"]
    lines = result.summary().splitlines()
    assert lines[:2] == ["verdict: applied", f"predicted share: {result.predicted_share:.2f} ({low:.2f} to {high:.2f})"]
    told = " ".join(result.explain().split())
    share = f"{result.predicted_share:.0%}, and 9 times in 10 between {low:.0%} and {high:.0%}"
    assert f"the step is predicted to remove {share}" in told
    assert told.endswith("and no proof: the other training rows were not seen.")
    marked = dataclasses.replace(result, note="<script>")
    shown = marked._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert f"{result.predicted_share:.0%} of the squared distance" in shown
    assert "svg" not in dataclasses.replace(result, predicted_share=None)._repr_html_()
    for text in (shown, told, str(about)):
        assert "tensor" not in text
    assert torch.is_tensor(result.head.parameters_CE)


def test_a_later_request_tells_of_all_so_far():
    told = " ".join(unlearned(batches=2).explain().split())
    assert "before the first request" in told
    assert "all requests so far are predicted to have removed" in told
    assert "the step is predicted" not in told


def test_an_interval_that_says_nothing_is_not_printed():
    result = dataclasses.replace(unlearned(), predicted_share=0.0, predicted_share_interval=(0.0, 1.0))
    for text in (result.explain(), result.summary()):
        assert "too few to tell" in " ".join(text.split())
        assert "0%" not in text
        assert "0.00" not in text
    narrow = dataclasses.replace(result, predicted_share_interval=(0.0, 0.9))
    assert "between 0% and 90%" in " ".join(narrow.explain().split())


def test_texts_are_at_most_80_columns_wide():
    every = dataclasses.replace(unlearned(), reasons=tuple(REASONS))
    for text in (every.explain(), every.summary()):
        assert max(map(len, text.splitlines())) <= 80
    assert len(every.explain().splitlines()) > 5
