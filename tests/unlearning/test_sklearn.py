"""scikit-learn: what each estimator minimises, and what comes back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso, LogisticRegression, Ridge, RidgeClassifier, SGDClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

from sfu.errors import ConfigError, DataError
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.sklearn import _coefficients, _head, _labels, _recipe, _weights, forget

N, F, D = 400, 60, 6
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, D)) @ np.diag(np.linspace(1, 0.3, D))
SCORES = X @ RNG.standard_normal((D, 3)) + RNG.standard_normal((N, 3))
NAMES = np.array(["ant", "bee", "cow"])[SCORES.argmax(1)]
TWO = np.where(SCORES[:, 0] > 0, 7, 3)
REAL = SCORES[:, :2] + 0.5
LABELS = (SCORES > 0).astype(int)
CLOSED = {"estimator": "closed_form"}
TIGHT = {"tol": 1e-10, "max_iter": 100_000}
HALF = {"ant": 1.0, "bee": 2.0, "cow": 0.5}

CASES = [
    (Ridge(alpha=2.0), REAL), (Ridge(alpha=2.0, fit_intercept=False), REAL), (Ridge(alpha=[2.0, 2.0]), REAL),
    (Ridge(), REAL[:, 0]), (RidgeClassifier(alpha=3.0), NAMES), (RidgeClassifier(), TWO), (RidgeClassifier(), LABELS),
    (RidgeClassifier(class_weight=HALF), NAMES), (RidgeClassifier(class_weight="balanced"), NAMES),
    (LogisticRegression(C=0.5, **TIGHT), NAMES), (LogisticRegression(C=0.5, **TIGHT), TWO),
    (LogisticRegression(C=0.5, class_weight=HALF, **TIGHT), NAMES),
    (LogisticRegression(fit_intercept=False, **TIGHT), TWO),
    (LogisticRegression(class_weight={3: 1.0, 7: 2.0}, **TIGHT), TWO),
    (LogisticRegression(solver="liblinear", **TIGHT), TWO),
    (LinearSVC(C=0.1, **TIGHT), NAMES), (LinearSVC(C=0.1, dual=False, **TIGHT), TWO),
    (LinearSVC(C=0.1, fit_intercept=False, **TIGHT), NAMES), (LinearSVC(class_weight="balanced", **TIGHT), TWO),
]  # fmt: skip


def counts_of(y):
    return dict(zip(*np.unique(y, return_counts=True), strict=True)) if y.ndim == 1 else None


@pytest.mark.parametrize(("estimator", "y"), CASES, ids=lambda one: str(one)[:60])
def test_the_estimator_is_at_the_optimum_of_the_objective_that_is_taken_for_its_own(estimator, y):
    estimator.fit(X, y)
    recipe = _recipe(estimator)
    labels = _labels(estimator, recipe, y)
    weights, total = _weights(estimator, labels, None, None, counts_of(y), N)
    head = _head(recipe, *_coefficients(estimator), N, total, False)
    rows = head.rows(torch.from_numpy(X), labels, weights)
    assert rows.weight == pytest.approx(head.total_weight)
    gradient = head.objective().gradient(rows, head.parameters_CE)
    assert float(gradient.abs().max()) < 1e-5
    away = head.objective().gradient(rows, head.parameters_CE * 1.1)
    assert float(away.abs().max()) > 1e-3


@pytest.mark.parametrize(("estimator", "y"), CASES, ids=lambda one: str(one)[:60])
def test_a_fitted_copy_comes_back_nearer_to_the_one_that_never_saw_the_rows(estimator, y):
    estimator.fit(X, y)
    before = np.asarray(estimator.coef_).copy()
    forgotten = forget(estimator, X[:F], y[:F], n_train=N, class_counts=counts_of(y), curvature=CLOSED)
    retrained = type(estimator)(**estimator.get_params()).fit(X[F:], y[F:])
    assert forgotten.result.applied
    assert np.array_equal(estimator.coef_, before)
    new = forgotten.estimator
    assert (np.shape(new.coef_), np.shape(new.intercept_)) == (np.shape(before), np.shape(estimator.intercept_))
    outputs = [np.asarray(X @ np.atleast_2d(one.coef_).T + one.intercept_) for one in (estimator, new, retrained)]
    left, nothing = (np.linalg.norm(one - outputs[2]) for one in (outputs[1], outputs[0]))
    assert left < 0.9 * nothing
    assert new.predict(X[:5]).dtype == estimator.predict(X[:5]).dtype


def test_the_share_is_predicted_although_l2_grows():
    """scikit-learn's alpha and C count for more on fewer rows; docs/curvature.md has the coverage."""
    pixels, digits = load_digits(return_X_y=True)
    rows = pixels / np.linalg.norm(pixels, axis=1, keepdims=True)
    right, off = [], []
    for seed in range(6):
        order = np.random.default_rng(seed).permutation(len(rows))
        for make, labels in ((RidgeClassifier, digits), (LogisticRegression, digits > 4)):
            features, y = rows[order], labels[order]
            whole, left = make().fit(features, y), make().fit(features[180:], y[180:])
            result = forget(whole, features[:180], y[:180], n_train=len(y), curvature=CLOSED).result
            head = result.head
            recipe = _recipe(whole)
            retained = head.rows(torch.from_numpy(features[180:]), _labels(whole, recipe, y[180:]))
            before, target = (torch.cat([w, b[:, None]], 1) for w, b in (_coefficients(whole), _coefficients(left)))
            hessian = build_operator(head.objective(), retained, before, Structure.products)
            share = 1 - float(hessian.quadratic(head.parameters_CE - target) / hessian.quadratic(before - target))
            low, high = result.predicted_share_interval
            right.append(low <= share <= high)
            off.append(abs(result.predicted_share - share))
    assert np.mean(right) >= 0.75
    assert np.mean(off) < 0.03


def test_a_pipeline_is_applied_and_says_that_its_steps_saw_the_rows():
    pipeline = make_pipeline(StandardScaler(), PCA(4), "passthrough", RidgeClassifier()).fit(X, NAMES)
    forgotten = forget(pipeline, X[:F], NAMES[:F], n_train=N, curvature=CLOSED, unlabelled=X[F : F + 50])
    alone = forget(
        pipeline[-1], pipeline[:-1].transform(X[:F]), NAMES[:F], n_train=N, curvature=CLOSED,
        unlabelled=pipeline[:-1].transform(X[F : F + 50]),
    )  # fmt: skip
    assert np.array_equal(forgotten.estimator[-1].coef_, alone.estimator.coef_)
    assert "StandardScaler, PCA) saw these rows, too" in forgotten.result.note
    assert forgotten.result.reasons[-1] == "trained_steps"
    assert forgotten.result.verdict == "applied_with_reservations"
    assert not np.array_equal(forgotten.estimator[-1].coef_, pipeline[-1].coef_)


def test_descent_is_taken_for_stopped_early_and_sample_weights_count():
    for loss, y in (("log_loss", NAMES), ("squared_hinge", TWO)):
        fitted = SGDClassifier(loss=loss, alpha=1e-2, random_state=0).fit(X, y)
        forgotten = forget(fitted, X[:F], y[:F], n_train=N, curvature={**CLOSED, "on_doubt": "apply"})
        assert "early_stopped" in forgotten.result.reasons
        assert forgotten.estimator.coef_.shape == fitted.coef_.shape
    weights = RNG.uniform(0.5, 2, N)
    ridge = Ridge().fit(X, REAL, sample_weight=weights)
    about = {"n_train": N, "sample_weight": weights[:F], "total_weight": weights.sum()}
    forgotten = forget(ridge, X[:F], REAL[:F], curvature=CLOSED, **about).estimator
    retrained = Ridge().fit(X[F:], REAL[F:], sample_weight=weights[F:])
    assert np.linalg.norm(forgotten.coef_ - retrained.coef_) < 0.9 * np.linalg.norm(ridge.coef_ - retrained.coef_)


def test_a_later_request_continues_from_the_head_of_the_one_before():
    ridge = Ridge().fit(X, REAL)
    first = forget(ridge, X[:30], REAL[:30], n_train=N, ledger=True, curvature=CLOSED)
    about = {"n_train": N - 30, "head": first.result.head, "curvature": CLOSED}
    second = forget(first.estimator, X[30:F], REAL[30:F], **about)
    at_once = forget(ridge, X[:F], REAL[:F], n_train=N, ledger=True, curvature=CLOSED)
    assert second.result.head.n_train == N - F
    np.testing.assert_allclose(second.estimator.coef_, at_once.estimator.coef_, rtol=0.1, atol=1e-3)
    again = forget(first.estimator, X[:30], REAL[:30], **about)
    assert again.result.reasons == ("already_forgotten",)
    with pytest.raises(DataError, match="head has other weights than the estimator"):
        forget(ridge, X[30:F], REAL[30:F], n_train=N - 30, head=first.result.head)
    with pytest.raises(DataError, match="370 training rows instead of n_train=400"):
        forget(first.estimator, X[30:F], REAL[30:F], n_train=N, head=first.result.head)


@pytest.mark.parametrize(
    ("estimator", "y", "given", "message"),
    [
        (Lasso(), REAL, {}, "sfu knows no Lasso of scikit-learn. It knows RidgeClassifier, Ridge"),
        (Ridge(alpha=[1.0, 2.0]), REAL, {}, "Ridge has alpha="),
        (Ridge(positive=True), REAL, {}, "Ridge has positive=True"),
        (LogisticRegression(l1_ratio=0.5, solver="saga", max_iter=5000), NAMES, {}, "has l1_ratio=0.5"),
        (LogisticRegression(solver="liblinear", intercept_scaling=2.0), TWO, {}, "has intercept_scaling=2.0"),
        (LinearSVC(loss="hinge"), NAMES, {}, "LinearSVC has loss='hinge', for which sfu has no objective"),
        (LinearSVC(penalty="l1", dual=False), NAMES, {}, "LinearSVC has penalty='l1'"),
        (LinearSVC(class_weight="balanced"), NAMES, {"class_counts": [1, 2, 3]}, "LinearSVC, which weighs"),
        (SGDClassifier(), NAMES, {}, "SGDClassifier has loss='hinge'"),
        (SGDClassifier(loss="log_loss", class_weight=HALF), NAMES, {}, "SGDClassifier, which weighs"),
        (RidgeClassifier(class_weight=HALF), NAMES, {"class_counts": {"ant": 400}}, "no number for class 'bee'"),
        (RidgeClassifier(), NAMES, {"weights": 1}, "weights is no argument of forget. Further ones are request"),
        (SGDClassifier(loss="log_loss", penalty="l1"), NAMES, {}, "SGDClassifier has penalty='l1'"),
        (RidgeClassifier(class_weight="balanced"), NAMES, {}, "class_weight='balanced' needs class_counts"),
        (RidgeClassifier(class_weight=HALF), NAMES, {"class_counts": [1, 2, 3]}, "3 numbers whose sum .* n_train=400"),
        (RidgeClassifier(), NAMES, {"sample_weight": np.ones(F)}, "sample_weight and total_weight belong together"),
    ],
)  # fmt: skip
def test_what_cannot_be_translated_is_refused(estimator, y, given, message):
    with pytest.raises(ConfigError, match=message):
        forget(estimator.fit(X, y), X[:F], y[:F], n_train=N, **given)


def test_a_solver_that_ran_out_of_iterations_is_taken_for_stopped_early():
    for estimator in (LogisticRegression(max_iter=5), LinearSVC(max_iter=2)):
        with pytest.warns(ConvergenceWarning):
            estimator.fit(X, NAMES)
        result = forget(estimator, X[:F], NAMES[:F], n_train=N, curvature={**CLOSED, "on_doubt": "apply"}).result
        assert "early_stopped" in result.reasons
        assert result.predicted_share is None
    reached = LogisticRegression(max_iter=1000).fit(X, NAMES)
    assert "early_stopped" not in forget(reached, X[:F], NAMES[:F], n_train=N, curvature=CLOSED).result.reasons


def test_descent_minimises_what_is_taken_for_its_objective():
    tight = {
        "max_iter": 3000,
        "tol": None,
        "learning_rate": "invscaling",
        "eta0": 0.5,
        "random_state": 0,
        "average": True,
    }
    for loss in ("log_loss", "squared_hinge"):
        fitted = SGDClassifier(loss=loss, alpha=1e-1, **tight).fit(X, TWO)
        recipe = _recipe(fitted)
        head = _head(recipe, *_coefficients(fitted), N, None, False)
        objective, rows = head.objective(), head.rows(torch.from_numpy(X), _labels(fitted, recipe, TWO))
        size = float((recipe.l2 * head.parameters_CE[:, :-1]).norm())
        assert float(objective.gradient(rows, head.parameters_CE)[:, :-1].norm()) < 0.05 * size
        new = forget(fitted, X[:F], TWO[:F], n_train=N, curvature={**CLOSED, "on_doubt": "apply"}).estimator
        assert np.array_equal(new._average_coef.ravel(), new.coef_.ravel())
        assert np.array_equal(new._standard_coef.ravel(), new.coef_.ravel())
        assert np.array_equal(new._average_intercept, new.intercept_)


def test_balanced_weights_stay_what_they_were_and_counts_go_by_label():
    counts, fitted = counts_of(NAMES), RidgeClassifier(class_weight="balanced").fit(X, NAMES)
    about = {"curvature": CLOSED, "class_counts": dict(reversed(counts.items()))}
    first = forget(fitted, X[:30], NAMES[:30], n_train=N, **about)
    second = forget(first.estimator, X[30:F], NAMES[30:F], n_train=N - 30, head=first.result.head, **about)
    weights = {label: N / (3 * count) for label, count in counts.items()}
    kept = sum(weights[name] for name in NAMES[F:])
    assert second.result.head.total_weight == pytest.approx(kept)
    by_order = forget(fitted, X[:30], NAMES[:30], n_train=N, curvature=CLOSED, class_counts=[*counts.values()])
    assert np.array_equal(by_order.estimator.coef_, first.estimator.coef_)


def test_an_infinite_C_is_no_regulariser():
    fitted = LogisticRegression(C=np.inf, **TIGHT).fit(X, TWO)
    assert _recipe(fitted).l2 == 0


def test_rows_and_estimators_that_do_not_fit_are_refused():
    pipeline = make_pipeline(StandardScaler(), RidgeClassifier()).fit(X, NAMES)
    with pytest.raises(DataError, match="StandardScaler of the pipeline does not take the rows"):
        forget(pipeline, X[:F, :5], NAMES[:F], n_train=N)
    with pytest.raises(DataError, match="y is missing"):
        forget(pipeline, X[:F], None, n_train=N)
    with pytest.raises(DataError, match=r"head=UnlearningResult is no head\. Give forgotten\.result\.head"):
        forget(pipeline, X[:F], NAMES[:F], n_train=N, head=forget(pipeline, X[:F], NAMES[:F], n_train=N).result)
    with pytest.raises(DataError, match="the RidgeClassifier is not fitted"):
        forget(RidgeClassifier(), X[:F], NAMES[:F], n_train=N)
    fitted = RidgeClassifier().fit(X, NAMES)
    with pytest.raises(DataError, match=r"the label 'dog' is no class of the RidgeClassifier\. Its classes are 'ant'"):
        forget(fitted, X[:2], ["ant", "dog"], n_train=N)
    with pytest.raises(DataError, match="5 wide but the head takes 6"):
        forget(fitted, X[:F, :5], NAMES[:F], n_train=N)
