"""Labels that are targets: which form they may have for which head, and every loss at them against float64 autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sfu.errors import ConfigError, DataError
from sfu.losses.base import Loss, Targets, make_loss
from sfu.losses.logistic import Logistic
from sfu.losses.quadratic import Quadratic
from sfu.losses.softmax import Softmax
from sfu.losses.targets import class_numbers, read_labels
from tests.losses.cases import defined, every_loss

SIGNED = Quadratic(other_target=-1.0)
COLUMN = torch.tensor([[1.0], [0.0], [1.0]])
MULTI_HOT = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 0, 1]])


def drawn_targets(loss: Loss, n_rows: int, n_outputs: int, seed: int) -> torch.Tensor:
    """Targets that the loss can have, with exact ones among them."""
    drawn = torch.randn(n_rows, n_outputs, generator=torch.Generator().manual_seed(seed)).double()
    if loss.targets is Targets.real:
        return 3 * drawn
    if loss.targets is Targets.binary:
        return (drawn > 0).double()
    if loss.targets is Targets.shares:
        return (0.5 + drawn).clamp(0, 1)
    shares = drawn.clamp(min=0) + 1e-3 * (drawn == drawn.max(1, keepdim=True).values)
    return shares / shares.sum(1, keepdim=True)


@every_loss
@settings(max_examples=40, deadline=None)
@given(n_outputs=st.integers(1, 4), seed=st.integers(0, 10**6), spread=st.sampled_from([0.0, 1.0, 30.0, 1e3]))
def test_value_slope_and_hessian_at_targets_are_autograds(loss, n_outputs, seed, spread):
    n_outputs = max(n_outputs, 2) if isinstance(loss, Softmax) else n_outputs
    points = spread * torch.randn(3, n_outputs, generator=torch.Generator().manual_seed(seed + 1)).double()
    targets = drawn_targets(loss, 3, n_outputs, seed)
    curved, size = loss.curvature(points, targets).dense(), 1 + float(points.abs().max())
    for row, (point, target) in enumerate(zip(points, targets, strict=True)):
        variable = point.clone().requires_grad_()
        value = defined(loss, variable, target)
        (slope,) = torch.autograd.grad(value, variable)
        values, slopes = loss.values(points, targets)[row].sum(), loss.slopes(points, targets)[row]
        torch.testing.assert_close(values, value.detach(), rtol=1e-12, atol=1e-13 * size)
        torch.testing.assert_close(slopes, slope, rtol=1e-12, atol=1e-13 * size)
        if spread > 0:  # none of the drawn points is at a kink of a hinge
            hessian = torch.autograd.functional.hessian(lambda z, t=target: defined(loss, z, t), point)
            torch.testing.assert_close(curved[row], hessian, rtol=1e-12, atol=1e-13)
    several = torch.stack([points, 2 * points], 1)
    of_one = loss.slopes(2 * points, targets)  # sums over other strides may end in another last bit
    torch.testing.assert_close(loss.slopes(several, targets)[:, 1], of_one, rtol=1e-14, atol=1e-14)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_class_number_and_its_one_hot_row_are_the_same_to_the_last_bit(loss, dtype):
    outputs = 4 * torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0), dtype=dtype)
    labels = torch.arange(50) % 4
    targets = read_labels(torch.eye(4)[labels], 50, 4, loss)
    for found in (loss.values, loss.slopes, lambda *at: loss.curvature(*at).dense()):
        assert torch.equal(found(outputs, labels), found(outputs, targets))


def test_label_smoothing_is_a_softmax_of_shares():
    outputs, labels = torch.randn(5, 4).double(), torch.tensor([0, 3, 1, 2, 2])
    shares = 0.9 * torch.eye(4).double()[labels] + 0.1 / 4
    smoothed = Softmax(label_smoothing=0.1)
    torch.testing.assert_close(Softmax().values(outputs, shares), smoothed.values(outputs, labels))
    torch.testing.assert_close(Softmax().slopes(outputs, shares), smoothed.slopes(outputs, labels))


def test_slopes_near_certainty_keep_their_digits():
    outputs, target = torch.tensor([[40.0, -40.0]]).double(), torch.tensor([[1.0, 0.0]]).double()
    expected = torch.tensor([[-1.0, 1.0]]).double() * torch.tensor(-40.0).double().exp()
    torch.testing.assert_close(Logistic().slopes(outputs, target), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(Logistic().values(outputs, target), expected.abs(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("labels", "n_outputs", "loss", "expected"),
    [
        (COLUMN, 1, "logistic", COLUMN),
        (COLUMN[:, 0], 1, "logistic", COLUMN),
        (COLUMN[:, 0].bool(), 1, "squared_hinge", COLUMN),
        (COLUMN[:, 0].to(torch.uint8), 1, "huber_hinge", COLUMN),
        (2 * COLUMN.int() - 1, 1, "squared_hinge", COLUMN),
        (2 * COLUMN[:, 0].long() - 1, 1, "logistic", COLUMN),
        (2 * COLUMN - 1, 1, SIGNED, COLUMN),
        (2 * COLUMN - 1, 1, "quadratic", 2 * COLUMN - 1),
        (torch.tensor([1.5, -2.0, 1e9]), 1, "quadratic", torch.tensor([[1.5], [-2.0], [1e9]])),
        (torch.tensor([1, 1, 1]), 1, "logistic", torch.ones(3, 1)),
        (torch.tensor([-1, -1, -1]), 1, "logistic", torch.zeros(3, 1)),
        (torch.tensor([0.25, 0.0, 1.0]), 1, "logistic", torch.tensor([[0.25], [0.0], [1.0]])),
        (MULTI_HOT, 3, "logistic", MULTI_HOT),
        (MULTI_HOT.bool(), 3, "logistic", MULTI_HOT),
        (2 * MULTI_HOT - 1, 3, SIGNED, MULTI_HOT),
        (MULTI_HOT - 7, 3, "quadratic", MULTI_HOT - 7),
        (torch.full((3, 3), 1 / 3), 3, "softmax", torch.full((3, 3), 1 / 3)),
    ],
    ids=str,
)
def test_targets_of_every_form(labels, n_outputs, loss, expected):
    loss = make_loss(loss) if isinstance(loss, str) else loss
    found = read_labels(labels, 3, n_outputs, loss)
    assert torch.equal(found, expected.double())
    assert torch.equal(read_labels(found, 3, n_outputs, loss), found)


def test_class_numbers_stay_what_they_are_and_one_hot_rows_become_them():
    labels = torch.tensor([2, 0, 1])
    for one in (labels, labels.int(), labels.to(torch.uint8)):
        found = read_labels(one, 3, 3, Logistic())
        assert found.dtype == torch.int64
        assert torch.equal(found, labels)
    for dtype in (torch.bool, torch.uint8, torch.float32):
        hot = torch.eye(3, dtype=dtype)[labels]
        assert torch.equal(class_numbers(hot, 3), labels)
    for other in (labels, MULTI_HOT, COLUMN, torch.eye(3) / 2, torch.eye(3, dtype=torch.complex64)):
        assert class_numbers(other, 3) is other
    assert class_numbers(torch.ones(3, 1), 1).shape == (3, 1)


@pytest.mark.parametrize(
    ("labels", "n_outputs", "loss", "message"),
    [
        (torch.zeros(2), 1, "logistic", r"shape \[2\], but the head has one output\. Give \[3\] or \[3, 1\], one"),
        (torch.zeros(3, 2), 1, "logistic", r"shape \[3, 2\], but the head has one output\. Give \[3\] or \[3, 1\]"),
        (torch.tensor(1.0), 1, "logistic", r"shape \[\], but the head has one output"),
        (torch.zeros(3, 2), 3, "logistic", r"shape \[3, 2\], but the head has 3 outputs\. Give \[3\], one class .* or "
                                           r"targets \[3, 3\], one for each output\."),
        (torch.zeros(2, 3), 3, "logistic", r"shape \[2, 3\], but the head has 3 outputs"),
        (torch.zeros(3, 1), 3, "logistic", r"shape \[3, 1\]\. Give .*labels\.squeeze\(1\)\.long\(\)\.$"),
        (torch.tensor([0.5, 1.5, 2]), 3, "quadratic", r"integer class indices .* If they are targets of a regression, "
                                                      r"give targets \[3, 3\], one for each output\."),
        (torch.tensor([0.5, 1.5, 2.0]), 3, "logistic", r"Give integer class indices 0 \.\. C-1\.$"),
        (torch.tensor([0, 1, 3]), 3, "softmax", r"run from 0 to 3, but the head has classes 0 \.\. 2\."),
        (torch.tensor([1, 2, 0]), 1, "logistic", r"targets hold 2 \(row 1, output 0\), which loss=logistic cannot have"
                                                 r"\. Give a number from 0 to 1 .* make the head with loss='quadratic"),
        (torch.tensor([1, 0, -1]), 1, "logistic", r"targets hold -1 \(row 2, output 0\)"),
        (torch.tensor([1.0, 0.5, 0.0]), 1, "squared_hinge", r"targets hold 0\.5 \(row 1, output 0\).*Give 0 or 1 \(or"),
        (MULTI_HOT + 0.5, 3, SIGNED, r"targets hold 1\.5 .*loss=quadratic cannot have.*'quadratic', without settings"),
        (torch.tensor([1.0, torch.nan, 0]), 1, "quadratic", r"targets have NaN .* 1 of 3 rows \(first: row 1\)\. Rem"),
        (COLUMN * torch.inf, 1, "quadratic", r"NaN or infinite values in 3 of 3 rows"),
        (COLUMN.to(torch.complex64), 1, "quadratic", r"targets are torch\.complex64\. Give real numbers\."),
        (MULTI_HOT, 3, "softmax", r"targets of row \d sum to [02], but loss=softmax .* sum to 1\. .*loss='logistic'"),
        (MULTI_HOT - 0.5, 3, "softmax", r"targets hold -0\.5 .* Give shares of at least 0 that sum to 1\.$"),
        (2 * torch.eye(3) - 1, 3, "softmax", r"targets hold -1 \(row 0, output 1\)"),
    ],
)  # fmt: skip
def test_labels_that_a_head_cannot_have(labels, n_outputs, loss, message):
    loss = make_loss(loss) if isinstance(loss, str) else loss
    with pytest.raises(DataError, match=message):
        read_labels(labels, 3, n_outputs, loss)
    with pytest.raises(DataError, match=r"^the (tensor of )?retained (labels|targets) "):
        read_labels(labels, 3, n_outputs, loss, "retained")


def test_class_weights_are_for_class_numbers():
    weighted = make_loss("logistic", class_weights=[1.0, 2.0])
    with pytest.raises(ConfigError, match=r"class_weights=\(1\.0, 2\.0\) are for .* Leave .* as its sample weight\.$"):
        weighted.row_weights(torch.ones(3, 2), None, torch.float64)
    assert weighted.row_weights(torch.tensor([1, 0]), None, torch.float64).tolist() == [2.0, 1.0]
