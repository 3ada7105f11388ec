from __future__ import annotations

import json
import math

import pytest

from sfu.reporting.words import failures
from sfu.results.aggregate import Statistic, aggregate
from tests.reporting.samples import make_metrics, make_row, sweep_runs


def metrics(**values: float | None) -> dict[str, object]:
    return {"rows": {"closed_form": {"access": "forget", "applied": True, **values}}}


def test_mean_and_sample_standard_deviation_by_hand() -> None:
    runs = [({"seed": str(seed)}, metrics(test_accuracy=value)) for seed, value in enumerate((70.0, 72.0, 77.0))]
    total = aggregate(runs)
    (group,) = total.groups
    assert group.n == 3
    assert group.over == {"seed": ["0", "1", "2"]}
    entry = group.rows["closed_form"]["test_accuracy"]
    assert entry.mean == pytest.approx(73.0)
    assert entry.std == pytest.approx(math.sqrt(13.0))  # (9 + 1 + 16) / 2
    assert entry.stderr == pytest.approx(math.sqrt(13.0 / 3))
    assert (entry.n, entry.missing) == (3, 0)


def test_missing_values_are_counted_and_never_zero() -> None:
    runs = [
        ({"seed": "0"}, metrics(mia=50.0, distance=None)),
        ({"seed": "1"}, metrics(mia=None, distance=None)),
        ({"seed": "2"}, metrics()),
        ({"seed": "3"}, {"rows": {"original": {"mia": 10.0}}}),
    ]
    row = aggregate(runs).groups[0].rows["closed_form"]
    assert row["mia"] == Statistic(50.0, None, None, 1, 3, None, [50.0, None, None, None])
    assert row["distance"] == Statistic(missing=4, values=[None] * 4)
    assert row.n == 3


def test_groups_are_every_other_override_in_order_of_size() -> None:
    runs = [
        ({"head.l2": l2, "seed": seed, "dataset": "digits"}, metrics(distance=float(l2)))
        for l2 in ("1e-3", "0", "5e-4", "1e-2")
        for seed in ("0", "1")
    ]
    total = aggregate(runs)
    assert total.varied == ["head.l2"]
    assert total.fixed == {"dataset": "digits"}
    assert [group.overrides for group in total.groups] == [{"head.l2": l2} for l2 in ("0", "5e-4", "1e-3", "1e-2")]
    assert [group.n for group in total.groups] == [2, 2, 2, 2]


def test_over_can_be_anything() -> None:
    runs = [({"forget.fraction": f, "seed": s}, metrics(mia=float(s))) for f in ("0.1", "0.2") for s in ("0", "4")]
    total = aggregate(runs, over=("forget.fraction",))
    assert total.varied == ["seed"]
    assert [g.rows["closed_form"].mean("mia") for g in total.groups] == [0.0, 4.0]


def test_failed_jobs_are_listed_and_not_averaged() -> None:
    runs = [
        ({"seed": "0"}, metrics(mia=50.0)),
        ({"seed": "1"}, None),
        ({"seed": "2"}, {"error": "ConfigError: head.l2"}),
    ]
    total = aggregate(runs)
    assert total.failed == [
        {"overrides": {"seed": "1"}, "error": None},
        {"overrides": {"seed": "2"}, "error": "ConfigError: head.l2"},
    ]
    assert (total.n_runs, total.groups[0].n, total.groups[0].n_failed) == (3, 1, 2)


def test_a_method_missing_from_the_first_run_keeps_its_place() -> None:
    total = aggregate(sweep_runs())
    assert list(total.groups[0].rows)[-2:] == ["closed_form", "unlearned_minus_paper"]
    assert total.groups[0].rows["closed_form"].n == 2


def test_withheld_steps_and_notes_are_kept() -> None:
    runs = [
        ({"seed": "0"}, {"rows": {"a": {"access": "forget", "applied": True, "note": "n"}}}),
        ({"seed": "1"}, {"rows": {"a": {"access": "forget", "applied": False, "note": "n"}}}),
    ]
    row = aggregate(runs).groups[0].rows["a"]
    assert (row.n_applied, row.notes) == (1, ["n"])


def test_the_aggregate_is_json() -> None:
    total = aggregate(sweep_runs()).to_json()
    assert json.loads(json.dumps(total, allow_nan=False)) == total


def test_nothing_at_all() -> None:
    assert aggregate([]).to_json() == {
        "schema": 1, "over": ["seed"], "spread": "stderr", "varied": [], "fixed": {}, "n_runs": 0, "failed": [],
        "failed_rows": [], "groups": [], "ranks": {},
    }  # fmt: skip


def test_a_row_that_failed_hides_neither_the_others_nor_itself() -> None:
    jit = make_row(73.0, 73.8, 73.0, 50.3, 1.4), make_row(74.0, 73.8, 73.0, 50.3, 1.4)
    broken = make_metrics(jit=jit[0], gkt={"access": "forget", "error": "SolverError: no"})
    total = aggregate([({"seed": "0"}, broken), ({"seed": "1"}, make_metrics(jit=jit[1]))])
    assert total.groups[0].rows["jit"].mean("test_accuracy") == 73.5
    assert "gkt" not in total.groups[0].rows
    assert total.failed == []
    assert failures(total) == ["seed=0: gkt: SolverError: no"]
