"""Neighbours and class means of scikit-learn: what comes back is what fitting without the rows gives."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor, NearestCentroid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sfu.errors import ConfigError, DataError
from sfu.sklearn import forget

PIXELS, DIGITS = load_digits(return_X_y=True)
X, DIGITS = PIXELS[:600] / 16, DIGITS[:600]
NAMES = np.array([f"digit {digit}" for digit in DIGITS])
REAL = X[:, :2] + DIGITS[:, None]
SEVERAL = np.stack([NAMES, np.where(DIGITS > 4, "large", "small")], 1)
GONE = np.random.default_rng(0).permutation(600)[:90]
LEFT = np.setdiff1d(np.arange(600), GONE)


@pytest.mark.parametrize(
    ("estimator", "rows", "y"),
    [
        (KNeighborsClassifier(), X, NAMES), (KNeighborsClassifier(weights="distance", algorithm="brute"), X, DIGITS),
        (KNeighborsClassifier(3, metric="cosine"), X.astype("f4"), SEVERAL),
        (KNeighborsClassifier(), csr_matrix(X), NAMES),
        (KNeighborsClassifier(p=1, algorithm="ball_tree"), PIXELS[:600].astype(int), NAMES),
        (KNeighborsRegressor(algorithm="kd_tree"), X, REAL), (KNeighborsRegressor(2), X, REAL[:, 0]),
        (KNeighborsRegressor(2), X, DIGITS),
    ],
)  # fmt: skip
def test_neighbours_are_those_of_a_fit_without_the_rows(estimator, rows, y):
    whole = clone(estimator).fit(rows, y)
    forgotten = forget(whole, rows[GONE], y[GONE])
    wanted = clone(estimator).fit(rows[LEFT], y[LEFT])
    new = forgotten.estimator
    distances, neighbours = new.kneighbors(rows)
    assert np.array_equal(neighbours, wanted.kneighbors(rows)[1])
    assert np.array_equal(distances, wanted.kneighbors(rows)[0])
    assert np.array_equal(new.predict(rows), wanted.predict(rows))
    assert new.predict(rows).dtype == wanted.predict(rows).dtype
    assert (new.n_samples_fit_, whole.n_samples_fit_) == (510, 600)
    result = forgotten.result
    assert (result.verdict, result.rows, result.n_train, result.note) == ("applied", 90, 510, None)
    assert "90 rows were forgotten" in result.explain()
    assert result.to_dict()["predicted_distance"] == 0
    with pytest.raises(DataError, match=r"has other rows: 90 rows of X are not in it .*, first row 0\. Give rows"):
        forget(new, rows[GONE], y[GONE])


def test_a_class_that_is_gone_is_no_class_any_more():
    whole = KNeighborsClassifier().fit(X, NAMES)
    of_one = NAMES == "digit 3"
    assert "digit 3" not in forget(whole, X[of_one], NAMES[of_one]).estimator.classes_


def test_a_pipeline_is_applied_although_it_rounds_few_rows_otherwise():
    whole = make_pipeline(StandardScaler(), PCA(20, svd_solver="full"), KNeighborsClassifier()).fit(X, NAMES)
    forgotten = forget(whole, X[GONE[:7]], NAMES[GONE[:7]], n_train=600)
    kept = np.setdiff1d(np.arange(600), GONE[:7])
    wanted = KNeighborsClassifier().fit(whole[:-1].transform(X)[kept], NAMES[kept])
    assert np.array_equal(forgotten.estimator.predict(X), wanted.predict(whole[:-1].transform(X)))
    assert (whole[-1].n_samples_fit_, forgotten.estimator[-1].n_samples_fit_) == (600, 593)
    assert forgotten.result.reasons == ("trained_steps",)
    assert "StandardScaler, PCA) saw these rows" in forgotten.result.note
    randomized = make_pipeline(PCA(20, svd_solver="randomized", random_state=0), KNeighborsClassifier()).fit(X, NAMES)
    with pytest.raises(DataError, match=r"A step \(PCA\) that treats rows otherwise at fit, as a randomized PCA does"):
        forget(randomized, X[:2], NAMES[:2])


def test_names_of_columns_stay():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=[f"pixel {number}" for number in range(64)])
    new = forget(KNeighborsClassifier().fit(frame, NAMES), frame.iloc[GONE], NAMES[GONE]).estimator
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert new.predict(frame.iloc[:5]).shape == (5,)


def test_equal_rows_are_counted():
    twice, labels = np.concatenate([X, X[:30]]), np.concatenate([NAMES, NAMES[:30]])
    whole = KNeighborsClassifier().fit(twice, labels)
    result = forget(whole, X[:40], NAMES[:40]).result
    assert (result.verdict, result.reasons) == ("applied_with_reservations", ("equal_rows_left",))
    assert (result.n_train, result.note) == (590, "30 equal rows stay, because fit was given them more often")
    both = forget(whole, np.concatenate([X[:30], X[:30], X[:30]]), np.tile(NAMES[:30], 3)).result
    assert (both.verdict, both.rows, both.reasons) == ("applied", 60, ("repeated_rows",))
    assert "30 rows were given more often than to fit" in both.note


@pytest.mark.parametrize("priors", ["uniform", "empirical"])
@pytest.mark.parametrize("whole_class", [False, True])
def test_means_are_those_of_a_fit_without_the_rows(priors, whole_class):
    y = np.where(np.isin(DIGITS, [0, 1, 2]), NAMES, "other")
    gone = np.flatnonzero(y == "digit 1") if whole_class else GONE
    left = np.setdiff1d(np.arange(600), gone)
    rows = X[:, X.std(0) > 0.2] if not whole_class else X[:, X.std(0) > 0.2][:, :20]
    whole = NearestCentroid(priors=priors).fit(rows, y)
    counts = dict(zip(*np.unique(y, return_counts=True), strict=True))
    forgotten = forget(whole, rows[gone], y[gone], class_counts=counts)
    wanted = NearestCentroid(priors=priors).fit(rows[left], y[left])
    for name in ("centroids_", "within_class_std_dev_", "deviations_", "class_prior_"):
        np.testing.assert_allclose(getattr(forgotten.estimator, name), getattr(wanted, name), rtol=1e-7, atol=1e-9)
    assert forgotten.estimator.classes_.tolist() == wanted.classes_.tolist()
    assert np.array_equal(forgotten.estimator.predict(rows), wanted.predict(rows))
    np.testing.assert_allclose(forgotten.estimator.predict_proba(rows), wanted.predict_proba(rows), atol=1e-6)
    assert forgotten.result.verdict == "applied"
    assert forgotten.result.n_train == len(left)


KNN, MEANS = KNeighborsClassifier().fit(X, NAMES), NearestCentroid().fit(X, NAMES)
COUNTS = np.unique(NAMES, return_counts=True)[1].tolist()


@pytest.mark.parametrize(
    ("estimator", "rows", "y", "more", "error", "message"),
    [
        (KNN, X[:2] + 1e-6, NAMES[:2], {}, DataError, "2 rows of X are not in it with their labels"),
        (KNN, X[:2], NAMES[1:3], {}, DataError, "2 rows of X are not in it with their labels"),
        (KNN, X[:2, :9], NAMES[:2], {}, DataError, r"X has shape \[2, 9\], but the .* has 64 features"),
        (KNN, X[:2], ["cat", "dog"], {}, DataError, r"the label 'cat' is no class of the .* Its classes are 'digit 0'"),
        (KNN, X[:2], NAMES[:3], {}, DataError, r"there are 2 rows and 3 labels\. Give one for each row"),
        (KNN, X[:2], SEVERAL[:2], {}, DataError, r"y has 2 labels a row, and fit had 1"),
        (KNN, X[:2], None, {}, DataError, r"y is missing"), (KNN, X[:0], NAMES[:0], {}, DataError, "at least one row"),
        (KNN, X, NAMES, {}, DataError, r"0 rows would be left, fewer than n_neighbors=5"),
        (KNN, X[:2], NAMES[:2], {"n_train": 599}, DataError, r"n_train=599, but the .* holds 600 rows"),
        (KNN, X[:2], NAMES[:2], {"unlabelled": X}, ConfigError, r"forgets exactly, and has no use for unlabelled"),
        (KNN, X[:2], NAMES[:2], {"class_counts": COUNTS}, ConfigError, r"has no use for class_counts\. Leave it out"),
        (KNN, X[:2], NAMES[:2], {"step": 1}, ConfigError, r"step is no argument of forget"),
        (KNeighborsClassifier(), X[:2], NAMES[:2], {}, DataError, "KNeighborsClassifier is not fitted"),
        (
            KNeighborsClassifier(metric="precomputed").fit(np.zeros((9, 9)), NAMES[:9]), X[:2], NAMES[:2], {},
            ConfigError, r"metric='precomputed', so it holds no rows",
        ),
        (MEANS, X[:2], NAMES[:2], {}, ConfigError, r"no counts\. Give class_counts.*sfu\.NearestCentroid"),
        (MEANS, X[:2], NAMES[:2], {"class_counts": COUNTS[:3]}, ConfigError, r"must be 10 counts of at least 1"),
        (MEANS, X[:2], NAMES[:2], {"class_counts": COUNTS, "n_train": 9}, ConfigError, r"sum to 600, not n_train=9"),
        (MEANS, X, NAMES, {"class_counts": COUNTS}, DataError, r"0 rows would be left, and classes with any: 0\."),
        (NearestCentroid(), X[:2], NAMES[:2], {"class_counts": COUNTS}, DataError, "NearestCentroid is not fitted"),
        (
            NearestCentroid(metric="manhattan").fit(X, NAMES), X[:2], NAMES[:2], {"class_counts": COUNTS}, ConfigError,
            r"has metric='manhattan', so its centroids are no means",
        ),
        (
            NearestCentroid(shrink_threshold=0.1).fit(X[:, 2:5], NAMES), X[:2, 2:5], NAMES[:2],
            {"class_counts": COUNTS}, ConfigError, r"has shrink_threshold=0\.1",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_out_is_named(estimator, rows, y, more, error, message):
    with pytest.raises(error, match=message):
        forget(estimator, rows, y, **more)
