"""EMMN and GKT: whole classes, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from sfu.errors import ConfigError, DataError, SolverError
from sfu.request import Access, ForgetRequest, MethodContext
from sfu.unlearning.classes import whole_classes
from sfu.unlearning.experimental.emmn import Emmn
from sfu.unlearning.experimental.gkt import Gkt
from tests.unlearning.cases import CONTEXT, case, class_case, flattened, name_of, trained

EMMN = Emmn(noise_rows=8, noise_steps=5)
GKT = Gkt(batches=8, batch_size=32, student_steps=3, noise=8, threshold=0.3)
BOTH = [EMMN, GKT]


def test_whole_classes_are_known_from_single_examples():
    labels = torch.tensor([0, 1, 1, 2, 2, 2])
    assert whole_classes(labels, torch.tensor([1, 2])) == (1,)
    assert whole_classes(labels, torch.tensor([0, 3, 4, 5])) == (0, 2)
    assert whole_classes(labels, torch.tensor([1, 3, 4, 5])) is None


@pytest.mark.parametrize("method", BOTH, ids=name_of)
def test_a_request_for_instances_is_refused(method):
    assert method.whole_classes
    assert method.access is Access.FORGET
    with pytest.raises(ConfigError, match=r"forgets whole classes only, .* Give forget\.classes="):
        method.unlearn(case()[0], CONTEXT)


def test_a_request_that_empties_the_head_or_contradicts_itself_is_refused():
    request, retained = class_case()
    features, labels = request.features_FD, request.labels_F
    with pytest.raises(DataError, match=r"forget the classes \[1\] but its labels are \[2\]"):
        ForgetRequest(request.head, features, labels, classes=(1,))
    with pytest.raises(DataError, match="forgetting all 4 classes would leave an empty head"):
        ForgetRequest(request.head, retained.features_RD[:4], torch.arange(4), classes=(0, 1, 2, 3))


def test_emmn_by_hand():
    request, _ = class_case()
    w, scale = request.head.parameters_CE, float(request.features_FD.square().mean().sqrt())
    drawn = torch.randn(8, 12, generator=CONTEXT.generator("noise")).double()
    noise = torch.nn.Parameter(drawn)
    labels, sign = torch.arange(4).repeat_interleave(2), torch.tensor([1.0, 1, 1, 1, -1, -1, 1, 1]).double()
    adam = torch.optim.Adam([noise], lr=0.1)
    for _ in range(3):
        adam.zero_grad()
        losses = cross_entropy(scale * noise @ w.T, labels, reduction="none")
        value = sum((sign * losses)[labels == c].mean() + 0.1 * (noise[labels == c] ** 2).mean() for c in range(4))
        value.backward()
        adam.step()
    learned = scale * noise.detach()
    for lr, part in ((0.02, labels >= 0), (0.01, labels != 2)):
        v = w.clone().requires_grad_()
        cross_entropy(learned[part] @ v.T, labels[part]).backward()
        w = w - lr * v.grad
    out = Emmn(noise_rows=2, noise_steps=3).unlearn(request, CONTEXT)
    torch.testing.assert_close(out.head.parameters_CE, w, rtol=1e-6, atol=1e-9)
    assert out.details == {"steps": 2, "classes": 1}


def test_emmns_noise_does_what_it_is_for():
    request, _ = class_case()
    labels, sign = torch.arange(4), torch.tensor([1, 1, -1, 1])
    losses = []
    for steps in (1, 40):
        noise, of = Emmn(noise_rows=8, noise_steps=steps)._noise(request, labels, sign, CONTEXT)
        losses.append(cross_entropy(request.head.logits(noise), of, reduction="none").reshape(4, 8).mean(1))
    assert (losses[1] < losses[0]).tolist() == [True, True, False, True]


def test_gkt_teaches_and_an_affine_student_comes_back_to_the_class_it_was_never_shown():
    """Two affine heads that agree on an open set agree everywhere: what GKT forgets, it forgets by stopping early."""
    request, _ = class_case()
    theirs = request.head.logits(request.features_FD).log_softmax(1)

    def apart(logits) -> float:
        return float((theirs.exp() * (theirs - logits.log_softmax(1))).sum(1).mean())

    out = Gkt(batches=60, batch_size=32, noise=8, threshold=0.2, lr=0.005).unlearn(request, CONTEXT)
    mine = out.head.logits(request.features_FD)
    assert 0 < out.details["passed"] < 0.5
    assert apart(mine) < 0.5 * apart(torch.zeros_like(theirs))
    assert float((mine.argmax(1) == 2).double().mean()) > 0.5


def test_gkt_teaches_through_the_gate_alone_and_says_when_nothing_passes():
    request, _ = class_case()
    gate = GKT._gate(request.head, request.features_FD, [2])
    assert torch.equal(gate, request.head.logits(request.features_FD).softmax(1)[:, 2] <= 0.3)
    with pytest.raises(SolverError, match=r"none of 256 generated rows passes .*\[2\].*threshold=1e-09.*Raise"):
        replace(GKT, threshold=1e-9).unlearn(request, CONTEXT)


@pytest.mark.parametrize("method", BOTH, ids=name_of)
def test_the_seed_decides_and_the_shape_of_the_parameters_does_not(method):
    request, _ = class_case()
    once, twice = (method.unlearn(request, CONTEXT).head.parameters_CE for _ in range(2))
    assert torch.equal(once, twice)
    other = method.unlearn(request, MethodContext(dict.fromkeys(CONTEXT.seeds, 9))).head.parameters_CE
    assert not torch.allclose(once, other, rtol=1e-6)
    flat = method.unlearn(flattened(request), CONTEXT).head.parameters_CE
    torch.testing.assert_close(flat.reshape(4, 12), once, rtol=1e-6, atol=1e-8)
    path = method.unlearn(request, replace(CONTEXT, keep_path=True)).path
    assert torch.equal(path[-1], once)
    assert torch.equal(path[0], trained().parameters_CE if method is EMMN else torch.zeros_like(once))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Emmn(noise_rows=0), "emmn: noise_rows=0"),
        (lambda: Emmn(impair_lr=0.0), r"emmn: impair_lr=0\.0"),
        (lambda: Gkt(threshold=1.0), r"gkt: threshold=1\.0"),
        (lambda: Gkt(batch_size=1), r"gkt: batch_size=1\. Give a whole number of at least 2"),
    ],
)
def test_settings_that_cannot_work_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
