"""Linearised heads against the dense p x p algebra, in float64 on a tiny network."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sfu.curvature.sampling import sampling_ratio
from sfu.errors import DataError, SolverError
from sfu.heads.linear import LinearHead
from sfu.heads.normal_equations import Checkpoint
from sfu.heads.settings import LinearisedSettings, LinearSettings, Training
from sfu.heads.train import train_head
from sfu.losses.base import make_loss
from sfu.losses.rows import Rows
from sfu.operators.build import build_operator
from sfu.operators.products import IN_COORDINATES, KrylovInverse
from sfu.operators.structure import Structure
from sfu.store import Store, key_of
from tests.heads.linearised.tiny import CPU, C, N, tiny_case

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def vectors(case, *shape):
    return torch.randn(*shape, 1, case.core.n_parameters, generator=torch.Generator().manual_seed(7)).double()


# --- the tangent


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_products_with_the_jacobian(layers):
    case = tiny_case(layers)
    several = vectors(case, 2, 2)
    pushed = case.core.push(case.features, several)
    torch.testing.assert_close(pushed, torch.einsum("ncp,abp->nabc", case.jacobian, several[..., 0, :]), **CLOSE)
    torch.testing.assert_close(
        case.core.push(case.features, several[0, 0], affine=True),
        case.fixed + case.jacobian @ several[0, 0, 0], **CLOSE,
    )  # fmt: skip
    cotangent = torch.randn(N, 2, C).double()
    pulled = case.core.pull(case.features, cotangent)
    torch.testing.assert_close(pulled, torch.einsum("nmc,ncp->mp", cotangent, case.jacobian)[:, None], **CLOSE)
    assert case.core.pull(case.features, cotangent[:, 0]).shape == (1, case.core.n_parameters)


def test_outputs_can_be_differentiated_in_parameters_and_features():
    case = tiny_case(2)
    head = case.train(tolerance=1e-3)
    parameters = vectors(case).requires_grad_()
    some, fast = case.features[:3], {"fast_mode": True}
    assert torch.autograd.gradcheck(lambda w: head.outputs(some, w), (parameters,), **fast)
    assert torch.autograd.gradgradcheck(lambda w: head.outputs(some, w).square(), (parameters,), **fast)
    rows = some.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: head.outputs(x, head.parameters_CE), (rows,), **fast)
    torch.testing.assert_close(head.outputs(case.features, head.parameters_CE), head.logits(case.features))


def test_the_leaky_variant_is_another_tangent():
    plain, leaky = tiny_case(2), tiny_case(2, slope=0.2)
    assert leaky.core.digest == plain.core.digest
    assert not torch.allclose(leaky.fixed, plain.fixed)
    torch.testing.assert_close(leaky.train().parameters_CE[0], leaky.optimum(torch.arange(N)), rtol=1e-6, atol=1e-8)


# --- training


@pytest.mark.parametrize("layers", [1, 3])
def test_exact_training_is_the_dense_solution(layers):
    case = tiny_case(layers, l2=1e-2, batch_size=30)
    seen = []
    head = train_head(
        case.features, case.labels, C, LinearisedSettings(l2=1e-2, tolerance=1e-10, max_iterations=3000),
        case.loss, seed=0, device=CPU, dtype=torch.float64, core=case.core, progress=lambda *at: seen.append(at),
    )  # fmt: skip
    torch.testing.assert_close(head.parameters_CE[0], case.optimum(torch.arange(N)), rtol=1e-6, atol=1e-8)
    measured = case.gradient(torch.arange(N), head.parameters_CE)
    assert float(measured.norm()) <= 1.1e-10
    torch.testing.assert_close(head.gradient_CE[0], measured, rtol=1e-3, atol=1e-12)
    assert seen
    assert seen[-1][1] == 3000
    largest = float(torch.linalg.eigvalsh(case.hessian(torch.arange(N)))[-1]) - 1e-2
    assert largest <= head.kept.bound <= 1.5 * largest
    assert head.kept.shares_C.tolist() == (case.labels.bincount().double() / N).tolist()


def test_any_convex_loss_can_be_trained_exactly():
    case = tiny_case(2, l2=1e-2)
    case.loss = make_loss("softmax")
    head = case.train(tolerance=1e-9)
    rows = head.rows(case.features, case.labels)
    w = head.parameters_CE.clone().requires_grad_()
    outputs = case.fixed + (case.jacobian @ w[0])
    value = torch.nn.functional.cross_entropy(outputs, case.labels) + 0.5e-2 * w.square().sum()
    assert float(torch.autograd.grad(value, w)[0].norm()) < 1e-8
    assert head.objective().value(rows, head.parameters_CE) == pytest.approx(float(value.detach()))


def test_gradient_descent_is_sgd_by_dense_algebra_and_keeps_the_gradient_that_is_left():
    case = tiny_case(1, l2=1e-2, scale=1.0)
    quick = LinearisedSettings().sgd
    quick.batch_size, quick.epochs, quick.milestones = 8, 12, [5, 9]
    head = case.train(training=Training.sgd, sgd=quick)
    w = velocity = torch.zeros(case.core.n_parameters).double()
    generator = torch.Generator().manual_seed(0)
    for epoch in range(quick.epochs):
        rate = quick.lr * quick.decay ** sum(epoch >= milestone for milestone in quick.milestones)
        for batch in torch.randperm(N, generator=generator).split(quick.batch_size):
            velocity = quick.momentum * velocity + case.gradient(batch, w)
            w = w - rate * velocity
    torch.testing.assert_close(head.parameters_CE[0], w, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(head.gradient_CE[0], case.gradient(torch.arange(N), head.parameters_CE), **CLOSE)
    config = LinearisedSettings().sgd
    assert (config.lr, config.momentum, config.batch_size, config.epochs) == (0.05, 0.9, 64, 50)
    assert list(config.milestones) == [24, 39]


def test_descent_that_diverges_says_so():
    case = tiny_case(2)
    config = LinearisedSettings().sgd
    config.lr, config.batch_size = 1e6, 8
    with pytest.raises(SolverError, match=r"diverged in epoch \d+: .*Lower head\.sgd\.lr=1e\+06"):
        case.train(training=Training.sgd, sgd=config)


def test_training_that_stagnates_says_so_and_where():
    case = tiny_case(2)
    case.core = case.core.to(CPU, torch.float32)
    with pytest.raises(SolverError, match=r"not head\.tolerance=1e-14, and stagnates there.*head\.dtype=float64"):
        case.train(tolerance=1e-14)
    with pytest.raises(SolverError, match=r"not head\.tolerance=1e-11, after head\.max_iterations=4"):
        tiny_case(2).train(max_iterations=4)


def test_training_goes_on_from_its_checkpoint(tmp_path):
    case = tiny_case(2, l2=1e-3)
    store, key = Store(tmp_path), key_of("x")
    options = {"seed": 0, "device": CPU, "dtype": torch.float64, "core": case.core}
    config = LinearisedSettings(l2=1e-3, tolerance=1e-9, max_iterations=3000)
    ticks: list[int] = []

    def stop(done: int, _: int) -> None:
        ticks.append(done)
        if done == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_head(case.features, case.labels, C, config, case.loss, progress=stop,
                   checkpoint=Checkpoint(key, store, seconds=0.0), **options)  # fmt: skip
    cached = Checkpoint(key, store).read(torch.zeros(1, case.core.n_parameters).double())
    begun, reached = (float(case.gradient(torch.arange(N), w).norm()) for w in (torch.zeros_like(cached), cached))
    assert reached < 0.2 * begun
    head = train_head(case.features, case.labels, C, config, case.loss, checkpoint=Checkpoint(key, store), **options)
    torch.testing.assert_close(head.parameters_CE[0], case.optimum(torch.arange(N)), rtol=1e-4, atol=1e-6)
    assert not store.has(key)
    store.write_tensors(key, {"parameters": cached})
    (tmp_path / key / "tensors.safetensors").write_bytes(b"damaged")
    assert Checkpoint(key, store).read(cached) is None


def test_one_layer_is_the_linear_head_with_an_offset():
    """K = 1: the last layer's features with a regularised constant column, fitted to what the core leaves."""
    case = tiny_case(1, l2=1e-2)
    linearised = case.train()
    design = torch.cat([case.features, torch.ones(N, 1).double()], 1)
    targets = case.loss.target_scale * torch.eye(C).double()[case.labels] - case.fixed
    gram = design.T @ design / N + case.l2 * torch.eye(design.shape[1]).double()
    wanted = torch.linalg.solve(gram, design.T @ targets / N).T
    weight, bias = linearised.parameters_CE[0].split([wanted[:, :-1].numel(), C])
    torch.testing.assert_close(weight.view(C, -1), wanted[:, :-1], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(bias, wanted[:, -1], rtol=1e-6, atol=1e-8)
    # and with an offset of zero it is the linear head itself
    silent = dataclasses.replace(case.core, top=_silenced(case.core.top))
    case.core = silent
    linear = train_head(
        design, case.labels, C, LinearSettings(l2=case.l2), case.loss, seed=0, device=CPU,
        dtype=torch.float64,
    )  # fmt: skip
    same = case.train()
    weight, bias = same.parameters_CE[0].split([wanted[:, :-1].numel(), C])
    torch.testing.assert_close(torch.cat([weight.view(C, -1), bias[:, None]], 1), linear.parameters_CE, rtol=1e-6,
                               atol=1e-8)  # fmt: skip
    assert isinstance(linear, LinearHead)
    torch.testing.assert_close(same.logits(case.features), linear.logits(design), rtol=1e-6, atol=1e-8)


def _silenced(top):
    import copy

    twin = copy.deepcopy(top)
    for tensor in twin.parameters():
        tensor.zero_()
    return twin


# --- curvature


@pytest.mark.parametrize("layers", [1, 3])
def test_hessian_products_norms_and_trace(layers):
    case = tiny_case(layers)
    head = case.train()
    rows = head.rows(case.features, case.labels)
    operator = build_operator(head.objective(), rows, head.parameters_CE, Structure.products)
    dense = case.hessian(torch.arange(N))
    some = vectors(case, 3)
    torch.testing.assert_close(operator.matmul(some)[:, 0], some[:, 0] @ dense, **CLOSE)
    torch.testing.assert_close(operator.quadratic(some), ((some[:, 0] @ dense) * some[:, 0]).sum(1), **CLOSE)
    generator, estimate = torch.Generator().manual_seed(0), 0.0
    for _ in range(8):
        signs = torch.randint(0, 2, (1, len(dense)), generator=generator, dtype=torch.int8).double()[0] * 2 - 1
        estimate += float(signs @ dense @ signs) / 8
    assert operator.trace() == pytest.approx(estimate, rel=1e-10)
    few = build_operator(head.objective(), head.rows(case.features[:3], case.labels[:3]), head.parameters_CE,
                         Structure.products)  # fmt: skip
    p, curved = len(dense), min(len(dense), 3 * C)  # three rows curve no more than 3 C directions
    mean = case.l2 + (few.trace() - case.l2 * p) / curved
    assert few.damped().mean_eigenvalue == pytest.approx(mean, rel=1e-12)
    assert curved < p
    solution = operator.solve(some[0])
    assert solution.converged
    torch.testing.assert_close(solution.value_CE[0], torch.linalg.solve(dense, some[0, 0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_coordinates", [0, IN_COORDINATES])
def test_all_dampings_from_one_krylov_space_are_the_separate_solves(in_coordinates):
    case = tiny_case(1, batch_size=13)
    request = case.request()
    inverse = KrylovInverse(request.hessian(Structure.products), in_coordinates)
    right, rhos = request.newton_gradient(), [0.0, 1e-3, 0.1, 10.0]
    found = torch.cat(list(inverse.solutions(right, rhos)))
    dense = case.hessian(case.forget)
    for rho, value in zip(rhos, found, strict=True):
        shifted = dense + rho * torch.eye(len(dense)).double()
        torch.testing.assert_close(value[0], torch.linalg.solve(shifted, right[0]), rtol=1e-5, atol=1e-7)
    assert inverse.residual < 1e-7


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-6), (torch.float32, 1e-3)])
def test_steps_are_scored_without_being_formed(dtype, within, monkeypatch):
    case = tiny_case(2)
    case.core = case.core.to(CPU, dtype)
    request = case.request(case.train(tolerance=1e-3))
    one, other = (request.rows(index).hessian(Structure.products) for index in torch.arange(24).split(15))
    right, rhos = request.newton_gradient(), [0.0, 1e-2, 0.1, 10.0]
    wanted = one.damped().scores(right, rhos, other)
    monkeypatch.setattr(KrylovInverse, "solutions", None)
    for found, known in zip(KrylovInverse(one, 0).scores(right, rhos, other), wanted, strict=True):
        torch.testing.assert_close(found, known, rtol=within, atol=0)


def test_the_forget_gradient_and_the_sampling_ratio():
    case = tiny_case(2)
    head = case.train()
    request = case.request(head)
    torch.testing.assert_close(request.forget_gradient()[0], case.gradient(case.forget, head.parameters_CE), **CLOSE)
    J, F = case.jacobian[case.forget], len(case.forget)
    slope = head.logits(case.features)[case.forget] - 5 * torch.eye(C).double()[case.labels[case.forget]]
    rows = torch.einsum("nc,ncp->np", slope, J)
    generator, squares = torch.Generator().manual_seed(0), 0.0  # sum_i |J_i^T s_i|^2 by random signs
    for _ in range(16):
        signs = torch.randint(0, 2, (F,), generator=generator).double() * 2 - 1
        squares += float((signs @ rows).square().sum()) / 16
    spread = (squares / F - rows.mean(0).square().sum()) / (F - 1) * (1 - F / N)
    assert sampling_ratio(request) == pytest.approx(
        float((request.forget_gradient() - head.gradient_CE).square().sum() / spread), rel=1e-9
    )


# --- bad input


def test_parameters_of_another_network_are_refused():
    head = tiny_case(2).train()
    with pytest.raises(DataError, match=r"parameters are \[1, 3\], but the linearised layers have \[1, 1"):
        dataclasses.replace(head, parameters_CE=torch.zeros(1, 3).double(), gradient_CE=torch.zeros(1, 3).double())
    with pytest.raises(DataError, match="no bias of its own"):
        dataclasses.replace(head, bias=True)


def test_rows_are_served_some_batches_at_a_time():
    case = tiny_case(2, batch_size=7)
    head = case.train()
    whole = head.objective().gradient(head.rows(case.features, case.labels), head.parameters_CE)
    rows = head.rows(case.features, case.labels, chunk_rows=20)
    assert [len(chunk.labels_B) for chunk in rows.chunks()] == [14] * 4 + [4]
    assert isinstance(rows, Rows)
    torch.testing.assert_close(head.objective().gradient(rows, head.parameters_CE), whole, **CLOSE)
