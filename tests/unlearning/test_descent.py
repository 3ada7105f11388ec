"""The descent that iterative methods share: its steps, its guard, its path; losses against the objective."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from sfu.errors import ConfigError, DivergedError, SourceFreeError
from sfu.losses.huber_hinge import HuberHinge
from sfu.losses.logistic import Logistic
from sfu.losses.quadratic import Quadratic
from sfu.losses.softmax import Softmax
from sfu.request import Access, MethodContext
from sfu.unlearning.descent import LONGEST_PATH, DescentProblem, Path, Sgd, descend, minibatches
from sfu.unlearning.differentiable import forgotten, mean_loss, regularizer, remaining, wrong_labels
from sfu.unlearning.methods.adversarial import Adversarial
from sfu.unlearning.methods.fine_tune import FineTune, RandomLabels
from sfu.unlearning.methods.jit import Jit
from sfu.unlearning.methods.neg_grad import NegGrad, NegGradPlus
from sfu.unlearning.methods.scrub import Scrub
from tests.unlearning.cases import CONTEXT, case


@pytest.mark.parametrize("loss", [Quadratic(), Logistic(), Softmax((1.0, 2.0, 3.0, 4.0)), HuberHinge()], ids=str)
def test_the_gradient_of_loss_and_regulariser_is_that_of_the_objective(loss):
    request, _ = case(loss, bias=True)
    parameters = request.head.parameters_CE.clone().requires_grad_()
    (mean_loss(request.head, parameters, forgotten(request)) + regularizer(request.head, parameters)).backward()
    torch.testing.assert_close(parameters.grad, request.forget_gradient(), rtol=1e-12, atol=1e-14)


def test_sgd_with_momentum_decay_and_clipping_by_hand():
    start = torch.tensor([[3.0, -4.0]], dtype=torch.float64)
    problem = DescentProblem(range(2), lambda w, _: 0.5 * (w**2).sum(), 2)
    end = descend(start, problem, Sgd(0.1, 0.5, 0.2, clip=1.0), CONTEXT)
    w, velocity = start.clone(), torch.zeros_like(start)
    for _ in range(2):
        velocity = 0.5 * velocity + w / w.norm() + 0.2 * w  # the gradient w, clipped to length 1; decay after clipping
        w = w - 0.1 * velocity
    torch.testing.assert_close(end.parameters_CE, w, rtol=1e-6, atol=0)
    assert end.steps == 2
    assert end.path == ()


@pytest.mark.parametrize("method", [NegGrad, RandomLabels, FineTune, Scrub], ids=lambda method: method.method_name)
def test_the_weight_decay_of_training_is_the_heads_l2_and_spares_the_bias(method):
    """The authors of these methods decay the weights as in training, so nothing but the l2 may tell two heads apart."""
    request, retained = case(Softmax(), bias=True)
    retained = retained if method().access is Access.RETAINED else None
    steps = {}
    for l2 in (0.0, 0.3):
        changed = replace(request, head=replace(request.head, l2=l2))
        one = {"lr": 0.1, "epochs": 1, "batch_size": 400, "momentum": 0.0}
        more = {"ascents": 0} if method is Scrub else {}
        head = method(**one, **more).unlearn(changed, CONTEXT, retained).head
        steps[l2] = head.parameters_CE - request.head.parameters_CE
    decay = -0.1 * 0.3 * request.head.parameters_CE
    decay[:, -1] = 0.0
    torch.testing.assert_close(steps[0.3] - steps[0.0], decay, rtol=1e-9, atol=1e-12)


def test_clipping_shortens_long_gradients_and_leaves_short_ones():
    start = torch.tensor([[3.0, -4.0]], dtype=torch.float64)
    problem = DescentProblem([None], lambda w, _: 0.5 * (w**2).sum(), 1)
    plain, loose = (descend(start, problem, Sgd(0.1, clip=clip), CONTEXT).parameters_CE for clip in (None, 50.0))
    assert torch.equal(plain, loose)
    assert torch.equal(plain, start - 0.1 * start)


def test_a_descent_that_runs_away_stops_and_says_where():
    request, _ = case()
    steps = []
    context = MethodContext(CONTEXT.seeds, progress=lambda done, total: steps.append(done))
    with pytest.raises(
        DivergedError,
        match=r"diverged at step \d+ of 50: .*lr=100\. These weights mean nothing\. Lower lr, or set clip",
    ):
        NegGrad(lr=100.0, epochs=50).unlearn(request, context)
    assert len(steps) < 49
    with pytest.raises(DivergedError, match="to nan"):
        descend(torch.ones(1, 1), DescentProblem(range(3), lambda w, _: w.sum() * float("nan"), 3), Sgd(0.1), CONTEXT)
    assert NegGrad(lr=1.0, clip=0.1).unlearn(request, CONTEXT).details["steps"] == 5


def test_the_path_holds_start_and_end_and_is_thinned_evenly():
    path = Path(keep=True)
    for step in range(1001):
        path.add(torch.tensor([float(step)]))
    points = [float(point) for point in path.ended(torch.tensor([1000.0]))]
    assert points[0] == 0
    assert points[-1] == 1000
    assert LONGEST_PATH / 2 <= len(points) <= LONGEST_PATH + 1
    assert len({b - a for a, b in itertools.pairwise(points[:-1])}) == 1
    assert Path(keep=False).ended(torch.ones(1)) == ()
    large = Path(keep=True)
    for _ in range(20):
        large.add(torch.empty((1 << 24) // 4))
    assert 2 <= len(large.points) <= 4


def test_every_row_is_in_one_batch_of_every_epoch():
    drawn = torch.Generator().manual_seed(0)
    batches = list(minibatches(10, 4, 2, drawn))
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    for epoch in (batches[:3], batches[3:]):
        assert torch.cat(epoch).sort().values.tolist() == list(range(10))


@pytest.mark.parametrize("n_classes", [2, 5])
def test_wrong_labels_are_wrong_and_uniform(n_classes):
    labels = torch.arange(20000) % n_classes
    wrong = wrong_labels(labels, n_classes, torch.Generator().manual_seed(0))
    assert not (wrong == labels).any()
    assert int(wrong.min()) == 0
    assert int(wrong.max()) == n_classes - 1
    counts = torch.bincount((wrong - labels) % n_classes, minlength=n_classes)[1:].double()
    assert float((counts / counts.mean() - 1).abs().max()) < 0.05


def test_methods_of_the_retained_data_refuse_to_go_without():
    with pytest.raises(SourceFreeError, match="scrub needs the retained data"):
        remaining(None, case()[0], "scrub")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, r"neg_grad: lr=0\.0\. Give a finite number above 0"),
        ({"lr": "fast"}, r"neg_grad: lr=fast\. Give a finite number"),
        ({"epochs": 0}, r"neg_grad: epochs=0\. Give a whole number of at least 1"),
        ({"epochs": 1.5}, r"neg_grad: epochs=1\.5"),
        ({"batch_size": True}, "neg_grad: batch_size=True"),
        ({"momentum": 1.0}, r"neg_grad: momentum=1\.0"),
        ({"weight_decay": -1.0}, r"neg_grad: weight_decay=-1\.0"),
        ({"clip": 0.0}, r"neg_grad: clip=0\.0"),
    ],
)
def test_settings_that_cannot_work_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        NegGrad(**settings)


@pytest.mark.parametrize(
    "method",
    [NegGrad(epochs=2), RandomLabels(epochs=2), Jit(epochs=2, sigma=0.1), FineTune(epochs=1), NegGradPlus(epochs=1),
     Scrub(epochs=2)],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
@pytest.mark.parametrize("loss", [Quadratic(), Softmax(), HuberHinge()], ids=str)
def test_settings_that_descend_together_end_where_each_ends_alone(method, loss):
    request, retained = case(loss)
    retained = retained if method.access is Access.RETAINED else None
    settings = [replace(method, lr=lr) for lr in (1e-3, 1e9, 1e-2)]
    assert all(method.descends_with(other) for other in settings)
    together = method.unlearn_together(settings, request, replace(CONTEXT, keep_path=True), retained)
    assert isinstance(together[1], DivergedError)
    for setting, outcome in (settings[0], together[0]), (settings[2], together[2]):
        alone = setting.unlearn(request, replace(CONTEXT, keep_path=True), retained)
        torch.testing.assert_close(outcome.head.parameters_CE, alone.head.parameters_CE, rtol=1e-9, atol=1e-12)
        assert outcome.details == alone.details
        assert len(outcome.path) == len(alone.path)


def test_only_what_differs_in_its_rate_alone_descends_together():
    assert not NegGrad().descends_with(NegGrad(epochs=3))
    assert not NegGrad().descends_with(RandomLabels())
    assert not Adversarial().descends_with(Adversarial(lr=1.0))
