"""A head that keeps sums over forgotten rows: requests one after another end where one request for all rows ends."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import sfu
from sfu.curvature.settings import curvature_settings
from sfu.errors import ArtifactError, ConfigError
from sfu.files import file_digest, write_tensors
from sfu.heads.base import Head
from sfu.heads.forgotten import Forgotten
from sfu.heads.ledger import PARTS, Ledger, Sums, joined
from sfu.readers import read_tensors
from sfu.request import ForgetRequest, MethodContext
from sfu.unlearning.methods.newton import Newton

N, D, C, F = 600, 12, 3, 120
CURVATURE = {"estimator": "closed_form"}


class Made:
    """A ridge head with a bias, at its optimum, and its rows."""

    def __init__(
        self, seed: int = 0, l2: float = 3e-3, l2_reduction: str = "mean", weights: torch.Tensor | None = None
    ) -> None:
        drawn = torch.Generator().manual_seed(seed)
        scales = torch.logspace(0.3, -0.7, D).double()
        self.features = torch.randn(N, D, generator=drawn).double() * scales + 0.3
        self.labels = (self.features[:, :C] + 0.5 * torch.randn(N, C, generator=drawn)).argmax(1)
        self.weights = torch.ones(N).double() if weights is None else weights
        self.l2, self.by_sum = l2, l2_reduction == "sum"
        total = float(self.weights.sum())
        self.bound = 2 * float((self.features.square().sum(1) + 1).max())
        self.head = sfu.LinearHead.from_module(
            self.layer(torch.ones(N, dtype=torch.bool)), l2=self.l2 * (total if self.by_sum else 1), n_train=N,
            loss="quadratic", l2_reduction=l2_reduction, weight=None if weights is None else total, bound=self.bound,
            ledger=True,
        )  # fmt: skip

    def hessian(self, kept: torch.Tensor) -> torch.Tensor:
        design, weights = torch.nn.functional.pad(self.features[kept], (0, 1), value=1), self.weights[kept]
        l2 = self.l2 * float(self.weights.sum() / weights.sum()) if self.by_sum else self.l2
        ridge = l2 * torch.eye(D + 1).double()
        ridge[-1, -1] = 0
        return (design * weights[:, None]).T @ design / weights.sum() + ridge

    def layer(self, kept: torch.Tensor) -> torch.nn.Linear:
        design, weights = torch.nn.functional.pad(self.features[kept], (0, 1), value=1), self.weights[kept]
        hot = torch.nn.functional.one_hot(self.labels[kept], C).double() * weights[:, None] / weights.sum()
        solved = torch.linalg.solve(self.hessian(kept), design.T @ hot).T
        layer = torch.nn.Linear(D, C, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(solved[:, :-1])
            layer.bias.copy_(solved[:, -1])
        return layer

    def forget(self, head: Head, rows: slice, **options):
        given = {} if self.head.weight is None else {"weights": self.weights[rows]}
        options = {"curvature": CURVATURE, **given, **options}
        return sfu.unlearn(head, self.features[rows], self.labels[rows], **options)

    def distance(self, head: Head) -> float:
        kept = torch.arange(N) >= F
        layer, hessian = self.layer(kept), self.hessian(kept)
        aim = torch.cat([layer.weight, layer.bias[:, None]], 1).detach()
        off, start = head.parameters_CE.double() - aim, self.head.parameters_CE - aim
        return float(((off @ hessian * off).sum() / (start @ hessian * start).sum()).sqrt())


SIZES = {"4 requests": (30,) * 4, "10 requests": (12,) * 10, "with single rows": (50, *[1] * 10, 60)}
WEIGHTS = torch.rand(N, generator=torch.Generator().manual_seed(5)).double() + 0.5


@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        *((name, {}) for name in SIZES),
        ("4 requests", {"l2": 0.1, "l2_reduction": "sum"}),
        ("4 requests", {"weights": WEIGHTS}),
    ],
)
def test_requests_one_after_another_end_as_near_as_one(sizes, how, tmp_path):
    once, summed, plain = [], [], []
    for seed in range(3):
        made = Made(seed, **how)
        at_once = made.forget(made.head, slice(0, F))
        head, alone, start = made.head, dataclasses.replace(made.head, forgotten=Forgotten()), 0
        for size in SIZES[sizes]:
            rows = slice(start, start + size)
            result, alone, start = made.forget(head, rows), made.forget(alone, rows).head, rows.stop
            assert result.applied
            assert result.note is None
            result.head.save(tmp_path / "head")
            head = sfu.load_head(tmp_path / "head")
        ledger = head.forgotten.ledger
        assert (len(ledger.parts), ledger.count, ledger.start.n_train, head.n_train) == (PARTS, F, N, N - F)
        assert result.predicted_distance_gain == pytest.approx(at_once.predicted_distance_gain, rel=0.25)
        for found, end in ((once, at_once.head), (summed, head), (plain, alone)):
            found.append(made.distance(end))
    assert sum(summed) < 1.1 * sum(once)
    assert sum(plain) > 1.4 * sum(summed)


@pytest.mark.parametrize("l2_reduction", ["mean", "sum"])
def test_gradient_and_weight_of_a_rewound_request_are_those_of_one_request_for_all_rows(l2_reduction):
    made = Made(l2_reduction=l2_reduction)
    first = made.forget(made.head, slice(0, 70)).head
    rewound = ForgetRequest(first, made.features[70:F], made.labels[70:F]).at_retained_l2().rewound()
    whole = ForgetRequest(made.head, made.features[:F], made.labels[:F]).at_retained_l2()
    assert rewound.head.l2 == pytest.approx(whole.head.l2, rel=1e-12)
    torch.testing.assert_close(rewound.newton_gradient(), whole.newton_gradient(), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(rewound.head.parameters_CE, made.head.parameters_CE, rtol=0, atol=0)
    assert (rewound.weight, rewound.n_retain, rewound.step_ratio) == (F, N - F, F / (N - F))
    assert rewound.alone().weight == F - 70
    assert ForgetRequest(made.head, made.features[:F], made.labels[:F]).rewound().earlier is None


def relative(one: Head, other: Head) -> float:
    return float((one.parameters_CE - other.parameters_CE).norm() / other.parameters_CE.norm())


@pytest.mark.parametrize("folds", [2, 5, 20])
def test_with_a_fixed_damping_the_step_is_that_of_one_request(folds):
    made = Made()
    fixed = {**CURVATURE, "folds": folds, "regularization": "fixed", "rho": 0.01}
    at_once = made.forget(made.head, slice(0, F), curvature=fixed).head
    head = made.head
    for rows in (slice(0, 50), slice(50, F)):
        head = made.forget(head, rows, curvature=fixed).head
    assert relative(head, at_once) < 1e-12


def test_what_was_gained_by_force_or_from_unlabelled_rows_is_not_lost_with_the_next_row():
    made, rows, last = Made(), slice(0, 60), slice(60, 61)
    forced = made.forget(made.head, rows, curvature={**CURVATURE, "on_doubt": "apply"}).head
    assert made.distance(made.forget(forced, last).head) < 1.1 * made.distance(forced)
    more = made.features[F:]
    first = made.forget(made.head, rows, unlabelled=more).head
    again = made.forget(first, last, unlabelled=more).head
    assert again.forgotten.ledger.count == 61
    without = made.forget(first, last)
    assert max(made.distance(again), made.distance(without.head)) < 1.1 * made.distance(first)
    assert without.head.forgotten.ledger is None
    assert "with unlabelled rows if there were any before" in without.note


def test_a_step_from_what_was_kept_at_training_ends_the_ledger_and_says_so():
    made = Made()
    kept = dataclasses.replace(made.head.kept, data_hessian=made.hessian(torch.ones(N, dtype=torch.bool)))
    ridge = torch.diag(3e-3 * made.head.regularized_E)
    kept = dataclasses.replace(kept, data_hessian=kept.data_hessian - ridge)
    result = made.forget(dataclasses.replace(made.head, kept=kept), slice(0, 60), curvature={"estimator": "stored"})
    assert result.head.forgotten.ledger is None
    assert "the head's ledger ends here" in result.note


def test_a_single_row_gets_the_curvature_of_those_before_and_their_doubts():
    made = Made()
    first, rows = made.forget(made.head, slice(0, 60)).head, slice(60, 61)
    assert made.forget(first, rows).details["rho"] is not None
    assert made.forget(first.without_ledger(), rows).details["rho"] is None  # alone it gets the bound's step
    ledger = dataclasses.replace(first.forgotten.ledger, unseen=0.61)
    doubtful = dataclasses.replace(first, forgotten=dataclasses.replace(first.forgotten, ledger=ledger))
    assert made.forget(doubtful, rows).details["unseen_share"] == pytest.approx(0.6, abs=1e-3)


def test_batches_of_a_head_with_a_ledger_predict_the_gain_of_all():
    made = Made()
    request = ForgetRequest(made.head, made.features[:F], made.labels[:F])
    at_once, batches = (
        Newton(curvature_settings(CURVATURE), batches=n).unlearn(request, MethodContext()) for n in (1, 4)
    )
    assert batches.head.forgotten.ledger.count == F
    assert batches.predicted_distance_gain == pytest.approx(at_once.predicted_distance_gain, rel=0.25)


def sums(weight: float) -> Sums:
    return Sums(torch.full((2, 2), weight), torch.full((1, 2), -weight), weight)


def test_new_parts_fill_the_places_and_then_join_the_lightest():
    parts = joined((), [sums(3.0)])
    assert [one.weight for one in parts] == [3]
    parts = joined(parts, [sums(1.0), sums(2.0)])
    assert sorted(one.weight for one in parts) == [1, 2, 3]
    parts = joined(parts, [sums(4.0), sums(5.0), sums(6.0)])
    assert sorted(one.weight for one in parts) == [2, 3, 4, 5, 7]
    for one in parts:
        assert torch.equal(one.hessian_EE, torch.full((2, 2), one.weight))
        assert torch.equal(one.gradient_CE, torch.full((1, 2), -one.weight))


@pytest.mark.parametrize("options", [{"request": "person"}, {"noise_sigma": 1e-6}, {"curvature": {"estimator": "oas"}}])
def test_a_request_that_is_not_served_from_the_sums_ends_the_ledger_and_says_so(options):
    made = Made()
    first = made.forget(made.head, slice(0, 60))
    second = made.forget(first.head, slice(60, F), **options)
    assert second.applied
    assert second.head.forgotten.ledger is None
    assert "the head's ledger ends here" in second.note
    without = made.forget(first.head.without_ledger(), slice(60, F), **options).head
    torch.testing.assert_close(second.head.parameters_CE, without.parameters_CE)
    third = made.forget(second.head, slice(F, F + 60))
    assert "this head had already forgotten 120 rows in 2 requests" in third.note


def test_the_sums_are_in_the_secret_file_alone_and_a_head_without_it_has_none(tmp_path):
    made = Made()
    made.head.save(tmp_path / "new")
    assert sfu.load_head(tmp_path / "new").forgotten.ledger == Ledger()
    head = made.forget(made.head, slice(0, 40)).head
    head.to(torch.device("cpu"), torch.float32).save(tmp_path / "head")
    for name in ("head.safetensors", "head.json"):
        assert b"ledger_" not in (tmp_path / name).read_bytes()
    loaded = sfu.load_head(tmp_path / "head").forgotten.ledger
    assert torch.equal(loaded.start.parameters_CE, made.head.parameters_CE)
    (tmp_path / "head.secret").unlink()
    assert sfu.load_head(tmp_path / "head").forgotten.ledger is None
    head.without_ledger().save(tmp_path / "head")
    assert b"ledger_" not in (tmp_path / "head.secret").read_bytes()
    assert sfu.load_head(tmp_path / "head").forgotten.ledger is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("numbers", lambda one: one + torch.tensor([0, 0, 0, 1, 0, 0, 0])),
        ("numbers", lambda one: one + torch.tensor([0, 0, 0, 0, 0, 2, 0])),
        ("numbers", lambda one: one * torch.nan),
        ("weights", lambda one: one - 1e3),
        ("weights", lambda one: one[:2]),
        ("hessians", lambda one: one[:, :-1]),
        ("parameters", lambda one: one.int()),
        ("gradients", None),
    ],
)
def test_a_damaged_ledger_is_refused(tmp_path, name, change):
    made = Made()
    made.forget(made.head, slice(0, 40)).head.save(tmp_path / "head")
    tensors = dict(read_tensors(tmp_path / "head.secret", ""))
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    found = tensors.pop(f"ledger_{name}")
    if change is not None:
        tensors[f"ledger_{name}"] = change(found)
    write_tensors(tmp_path / "head.secret", tensors, {"head": file_digest(tmp_path / "head.safetensors")}, private=True)
    with pytest.raises(ArtifactError, match=r"ledger|numbers"):
        sfu.load_head(tmp_path / "head")


def test_only_a_quadratic_head_keeps_a_ledger():
    layer = torch.nn.Linear(D, C)
    with pytest.raises(ConfigError, match="loss=softmax cannot keep a ledger"):
        sfu.LinearHead.from_module(layer, l2=1e-3, n_train=N, loss="softmax", ledger=True)
    with pytest.raises(ConfigError, match="ledger='yes'"):
        sfu.LinearHead.from_module(layer, l2=1e-3, n_train=N, loss="quadratic", ledger="yes")
