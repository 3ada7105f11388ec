"""The upper rows: each against a few lines of its own, or what it must equal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.func import jacrev

from sfu.errors import ConfigError, DivergedError, SourceFreeError
from sfu.heads.base import Head
from sfu.heads.train import train_head
from sfu.losses.logistic import Logistic
from sfu.losses.quadratic import Quadratic
from sfu.losses.softmax import Softmax
from sfu.request import Access, MethodContext
from sfu.unlearning.differentiable import forgotten
from sfu.unlearning.experimental.delta_grad import DeltaGrad, QuasiHessian
from sfu.unlearning.experimental.sisa import Sisa
from sfu.unlearning.importance import fisher_diagonal, squared_gradients
from sfu.unlearning.methods.fine_tune import FineTune
from sfu.unlearning.methods.fisher import Fisher
from sfu.unlearning.methods.neg_grad import NegGradPlus
from sfu.unlearning.methods.scrub import Scrub
from sfu.unlearning.methods.ssd import Ssd
from tests.unlearning.cases import CONFIG, CONTEXT, PLAIN, WITH_L2, case, flattened, name_of, rows

ALL = [FineTune(epochs=1), NegGradPlus(epochs=1), Scrub(epochs=2), Ssd(alpha=1.0), Fisher(), DeltaGrad(), Sisa(CONFIG)]


def slopes(head, features, labels, w):
    return features @ w.T - torch.nn.functional.one_hot(labels, 4)


@pytest.mark.parametrize("loss", [Quadratic(), Logistic((1.0, 2.0, 3.0, 4.0)), Softmax()], ids=str)
def test_importances_against_jacobians(loss):
    request, _ = case(loss, n_forget=6)
    head, rows = request.head, forgotten(request)
    jacobian = jacrev(lambda w: head.outputs(rows.features_ND, w))(head.parameters_CE)  # [F, C, C, E]
    outputs = head.outputs(rows.features_ND, head.parameters_CE)
    weights = loss.row_weights(rows.labels_N, None, torch.float64)
    share = torch.full((6,), 1 / 6, dtype=torch.float64) if weights is None else weights / weights.sum()
    per_row = torch.einsum("fcde,fc->fde", jacobian, loss.slopes(outputs, rows.labels_N))
    torch.testing.assert_close(
        squared_gradients(head, rows), torch.einsum("f,fde->de", share, per_row**2), rtol=1e-10, atol=1e-14
    )
    gauss = torch.einsum("fcde,fck,fkde->fde", jacobian, loss.curvature(outputs, rows.labels_N).dense(), jacobian)
    torch.testing.assert_close(
        fisher_diagonal(head, rows), torch.einsum("f,fde->de", share, gauss), rtol=1e-10, atol=1e-14
    )


def test_the_heads_short_way_is_the_general_one():
    request, _ = case()
    head, outputs_BC = request.head, torch.randn(40, 4).double()
    share = torch.rand(40).double()
    short = head.squared_pulls(request.features_FD, outputs_BC, share)
    torch.testing.assert_close(
        short, Head.squared_pulls(head, request.features_FD, outputs_BC, share), rtol=1e-12, atol=0
    )
    whole = squared_gradients(head, forgotten(request))
    in_pairs = squared_gradients(head, forgotten(request), numbers=100)
    torch.testing.assert_close(in_pairs, whole, rtol=1e-12, atol=0)


def test_fine_tuning_by_hand():
    request, retained = case()
    w = request.head.parameters_CE
    x, y = retained.features_RD, retained.labels_R
    for _ in range(2):
        w = w - 0.05 * (slopes(request.head, x, y, w).T @ x / 360 + 0.01 * w)
    out = FineTune(lr=0.05, epochs=2, batch_size=360, **WITH_L2).unlearn(request, CONTEXT, retained).head
    torch.testing.assert_close(out.parameters_CE, w, rtol=1e-10, atol=1e-13)


def test_neg_grad_plus_by_hand():
    request, retained = case()
    w, x, y = request.head.parameters_CE, retained.features_RD, retained.labels_R
    stay = slopes(request.head, x, y, w).T @ x / 360 + 0.01 * w
    leave = slopes(request.head, request.features_FD, request.labels_F, w).T @ request.features_FD / 40
    expected = w - 0.1 * (0.8 * stay - 0.2 * leave)
    method = NegGradPlus(lr=0.1, epochs=1, batch_size=400, alpha=0.8, **PLAIN)
    out = method.unlearn(request, CONTEXT, retained)
    torch.testing.assert_close(out.head.parameters_CE, expected, rtol=1e-10, atol=1e-13)
    assert replace(method, batch_size=16).unlearn(request, CONTEXT, retained).details["steps"] == 23


def test_scrub_by_hand():
    request, retained = case(Softmax())
    head, x, y = request.head, retained.features_RD, retained.labels_R
    w0 = head.parameters_CE

    def kl(w, features):
        teacher, student = ((features @ v.T / 4).softmax(1) for v in (w0, w))
        return 16 * (teacher * (teacher.log() - student.log())).sum(1).mean()

    w = w0.clone()
    for epoch in range(2):
        for ascend in (True, False) if epoch < 1 else (False,):
            v = w.clone().requires_grad_()
            task = torch.nn.functional.cross_entropy(x @ v.T, y)
            (-kl(v, request.features_FD) if ascend else 0.9 * task + 0.1 * kl(v, x)).backward()
            w = w - 0.5 * (v.grad + 0.01 * w)  # the head's l2 in every step
    method = Scrub(
        lr=0.5, epochs=2, ascents=1, batch_size=360, forget_batch_size=40, alpha=0.1, gamma=0.9, **WITH_L2
    )  # fmt: skip
    out = method.unlearn(request, CONTEXT, retained)
    torch.testing.assert_close(out.head.parameters_CE, w, rtol=1e-9, atol=1e-12)
    assert out.details["steps"] == 3


def test_ssd_by_hand():
    """As the authors' code has it: squares of the gradient of each batch's mean cross-entropy, whatever the loss."""
    request, retained = case()
    w, drawn = request.head.parameters_CE, CONTEXT.generator("training")
    of = {}
    order = {"forget": torch.randperm(40, generator=drawn), "retain": torch.randperm(360, generator=drawn)}
    forget = [(request.features_FD[i], request.labels_F[i]) for i in order["forget"]]
    everything = [(retained.features_RD[i], retained.labels_R[i]) for i in order["retain"]] + forget
    for name, examples in (("forget", forget), ("all", everything)):
        squares = []
        for start in range(0, len(examples), 25):  # batches of 25, of which one has 10 retained and 15 forget rows
            x, y = (torch.stack(column) for column in zip(*examples[start : start + 25], strict=True))
            residual = (x @ w.T).softmax(1) - torch.nn.functional.one_hot(y, 4)
            squares.append((residual.T @ x / len(y)) ** 2)
        of[name] = torch.stack(squares).mean(0)
    chosen = of["forget"] > 2.0 * of["all"]
    expected = torch.where(chosen, w * (0.7 * of["all"] / of["forget"]).clamp(max=1), w)
    method = Ssd(alpha=2.0, dampening=0.7, batch_size=25)
    out = method.unlearn(request, CONTEXT, retained)
    torch.testing.assert_close(out.head.parameters_CE, expected, rtol=1e-10, atol=1e-13)
    assert 0 < out.details["dampened"] == int(chosen.sum()) < chosen.numel()
    by_rows = replace(method, importance="rows").unlearn(request, CONTEXT, retained)
    assert by_rows.details["dampened"] != out.details["dampened"]


def test_fewer_rows_seem_more_important_to_batches_and_not_to_rows():
    """The mean of few rows scatters more than that of a batch, whatever the rows hold."""
    dampened = {
        importance: [Ssd(importance=importance).unlearn(*few).details["dampened"] for few in small_requests()]
        for importance in ("batches", "rows")
    }
    assert sum(dampened["batches"]) > 10 * (1 + sum(dampened["rows"]))


def small_requests():
    for start in range(0, 40, 4):
        request, retained = case()
        features, labels = rows()
        gone = torch.zeros(400, dtype=torch.bool)
        gone[start : start + 4] = True
        yield (
            replace(request, features_FD=features[gone], labels_F=labels[gone]), CONTEXT,
            replace(retained, features_RD=features[~gone], labels_R=labels[~gone]),
        )  # fmt: skip


def test_ssd_by_rows_by_hand():
    request, retained = case()
    head, w = request.head, request.head.parameters_CE
    of = {}
    for name, x, y in (
        ("forget", request.features_FD, request.labels_F), ("retain", retained.features_RD, retained.labels_R),
    ):  # fmt: skip
        of[name] = torch.stack([torch.outer(s, a) ** 2 for s, a in zip(slopes(head, x, y, w), x, strict=True)]).mean(0)
    everything = 0.1 * of["forget"] + 0.9 * of["retain"]
    expected = w.clone()
    chosen = of["forget"] > 1.2 * everything
    expected[chosen] *= (0.7 * everything / of["forget"]).clamp(max=1)[chosen]
    out = Ssd(alpha=1.2, dampening=0.7, importance="rows").unlearn(request, CONTEXT, retained)
    torch.testing.assert_close(out.head.parameters_CE, expected, rtol=1e-10, atol=1e-13)
    assert out.details["dampened"] == int(chosen.sum()) > 0
    none = Ssd(alpha=1e6).unlearn(request, CONTEXT, retained)
    assert not none.applied
    assert "no parameter matters 1e+06 times more" in none.note
    assert torch.equal(none.head.parameters_CE, w)


def test_fisher_by_hand():
    request, retained = case()
    information = retained.features_RD.square().mean(0).expand(4, 12)
    noise = torch.randn(4, 12, generator=CONTEXT.generator("noise"), dtype=torch.float64)
    expected = request.head.parameters_CE + (0.01 * (1 / (information + 1e-8)).clamp(max=2.0)).sqrt() * noise
    out = Fisher(alpha=0.01, cap=2.0).unlearn(request, CONTEXT, retained).head
    torch.testing.assert_close(out.parameters_CE, expected, rtol=1e-10, atol=1e-13)


def test_sisa_is_exact_for_its_own_ensemble():
    """Forgetting equals training the same shards without the forgotten rows; the mean of heads votes as their mean."""
    request, retained = case()
    out = Sisa(CONFIG, shards=3).unlearn(request, CONTEXT, retained)
    shard = torch.randint(3, (400,), generator=CONTEXT.generator("folds"))
    where = {"seed": 0, "device": torch.device("cpu"), "dtype": torch.float64}
    heads = [
        train_head(retained.features_RD[part], retained.labels_R[part], 4, CONFIG, Quadratic(), **where)
        for part in (shard[:360] == k for k in range(3))
    ]
    mean = sum(head.logits(request.features_FD) for head in heads) / 3
    torch.testing.assert_close(out.head.logits(request.features_FD), mean, rtol=1e-9, atol=1e-11)
    assert out.details["shards_retrained"] == 3
    assert out.details["storage_mb"] == 3 * 48 * 8 / 2**20
    one = Sisa(CONFIG, shards=5).unlearn(case(n_forget=1)[0], CONTEXT, case(n_forget=1)[1])
    assert one.details["shards_retrained"] == 1
    with pytest.raises(ConfigError, match=r"sisa: shards=100000 leaves a shard"):
        Sisa(CONFIG, shards=100000).unlearn(request, CONTEXT, retained)


def test_the_quasi_hessian_meets_its_pairs_and_is_exact_on_their_span():
    drawn = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=drawn, dtype=torch.float64)
    hessian = root @ root.T + torch.eye(6)
    quasi = QuasiHessian(memory=2)
    assert not quasi
    quasi.add(torch.ones(6).double(), -torch.ones(6).double())  # no curvature above 0: left out
    assert not quasi
    for _ in range(3):
        step = torch.randn(6, generator=drawn, dtype=torch.float64)
        quasi.add(step, hessian @ step)
    torch.testing.assert_close(quasi.apply(step), hessian @ step, rtol=1e-9, atol=1e-9)  # the secant condition
    matrix = torch.stack([quasi.apply(column) for column in torch.eye(6).double()])
    torch.testing.assert_close(matrix, matrix.T, rtol=1e-9, atol=1e-9)
    assert float(torch.linalg.eigvalsh(matrix)[0]) > 0
    # two BFGS updates of sigma I, written out
    pairs = list(quasi._pairs)
    dense = float(pairs[-1][1] @ pairs[-1][0] / (pairs[-1][0] @ pairs[-1][0])) * torch.eye(6).double()
    for s, y in pairs:
        dense = dense - torch.outer(dense @ s, dense @ s) / (s @ dense @ s) + torch.outer(y, y) / (y @ s)
    torch.testing.assert_close(matrix, dense, rtol=1e-9, atol=1e-9)


def test_delta_grad_with_every_step_exact_is_retraining_by_the_same_descent():
    request, retained = case()
    head, lr = request.head, 0.05
    x, y = torch.cat([request.features_FD, retained.features_RD]), torch.cat([request.labels_F, retained.labels_R])

    def descent(features, labels):
        w = torch.zeros(4, 12).double()
        for _ in range(30):
            w = w - lr * (slopes(head, features, labels, w).T @ features / len(labels) + 0.01 * w)
        return w

    out = DeltaGrad(steps=30, lr=lr, burn_in=30).unlearn(request, CONTEXT, retained)
    expected = head.parameters_CE + descent(retained.features_RD, retained.labels_R) - descent(x, y)
    torch.testing.assert_close(out.head.parameters_CE, expected, rtol=1e-9, atol=1e-12)
    assert out.details["exact_steps"] == 30
    fast = DeltaGrad(steps=30, lr=lr, burn_in=5, period=5).unlearn(request, CONTEXT, retained)
    assert fast.details["exact_steps"] == 10
    missed = (fast.head.parameters_CE - expected).norm() / (expected - head.parameters_CE).norm()
    assert float(missed) < 0.15


def test_delta_grads_own_step_converges_and_too_long_a_step_is_refused():
    request, retained = case()
    out = DeltaGrad(steps=1000).unlearn(request, CONTEXT, retained)
    where = {"seed": 0, "device": torch.device("cpu"), "dtype": torch.float64}
    retrained = train_head(retained.features_RD, retained.labels_R, 4, CONFIG, Quadratic(), **where)
    shift = retrained.parameters_CE - request.head.parameters_CE
    assert float((out.head.parameters_CE - retrained.parameters_CE).norm() / shift.norm()) < 0.02
    with pytest.raises(DivergedError, match=r"path diverged at step .* with lr=100\. Lower lr"):
        DeltaGrad(lr=100.0).unlearn(request, CONTEXT, retained)


@pytest.mark.parametrize("method", ALL, ids=name_of)
def test_they_declare_the_retained_data_and_the_seed_decides(method):
    request, retained = case()
    assert method.access is Access.RETAINED
    with pytest.raises(SourceFreeError, match="needs the retained data"):
        method.unlearn(request, CONTEXT)
    once, twice = (method.unlearn(request, CONTEXT, retained).head.parameters_CE for _ in range(2))
    assert torch.equal(once, twice)


@pytest.mark.parametrize("method", ALL[:5], ids=name_of)
def test_the_shape_of_the_parameters_does_not_matter(method):
    request, retained = case()
    plain = method.unlearn(request, CONTEXT, retained).head.parameters_CE
    flat = method.unlearn(flattened(request), CONTEXT, retained).head.parameters_CE
    torch.testing.assert_close(flat.reshape(4, 12), plain, rtol=1e-9, atol=1e-12)


def test_importances_are_cached_between_settings():
    request, retained = case()
    context = MethodContext(CONTEXT.seeds, memory={})
    Ssd(alpha=1.0).unlearn(request, context, retained)
    (cached,) = context.memory.values()
    (key,) = context.memory
    context.memory[key] = tuple(torch.zeros_like(importance) for importance in cached)
    assert not Ssd(alpha=2.0).unlearn(request, context, retained).applied  # by the cached importances
    assert Ssd(alpha=0.5, batch_size=7).unlearn(request, context, retained).applied
    assert Ssd(alpha=0.5, importance="rows").unlearn(request, context, retained).applied


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NegGradPlus(alpha=1.0), r"neg_grad_plus: alpha=1\.0"),
        (lambda: Scrub(temperature=0.0), r"scrub: temperature=0\.0"),
        (lambda: Scrub(ascents=-1), "scrub: ascents=-1"),
        (lambda: Ssd(alpha=0.0), r"ssd: alpha=0\.0"),
        (lambda: Ssd(importance="fisher"), "ssd: importance=fisher"),
        (lambda: Fisher(cap=-1.0), r"fisher: cap=-1\.0"),
        (lambda: Sisa(CONFIG, shards=0), "sisa: shards=0"),
        (lambda: DeltaGrad(period=0), "delta_grad: period=0"),
        (lambda: DeltaGrad(lr=-1.0), r"delta_grad: lr=-1\.0"),
    ],
)
def test_settings_that_cannot_work_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
