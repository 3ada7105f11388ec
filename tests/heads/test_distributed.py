"""Rows that are spread over processes give the head of all rows, and an error of one process reaches the others."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import sfu
from sfu.deadline import limit_time
from sfu.distributed import Ranks
from sfu.errors import ConfigError, SfuError
from sfu.heads.linear import LinearHead
from sfu.heads.settings import LinearSettings, Training
from sfu.heads.train import train_head
from sfu.losses.rows import Rows
from tests.ranks import SECONDS, run_ranks
from tests.unlearning.cases import rows

FEATURES, LABELS = rows()
NAMES = np.array(["ant", "bee", "cow", "dog"])[LABELS.numpy()]
WEIGHTS = torch.linspace(0, 2, len(LABELS), dtype=torch.float64)
ORDER = LABELS.argsort()  # the ranks hold rows of different classes
PAIR, WORLD = [0, 150, 400], [0, 30, 30, 190, 400]  # the second of four has no row
TRAINED: dict[str, tuple[list[int], dict[str, Any]]] = {
    "quadratic": (PAIR, {"loss": "quadratic", "bias": False}),
    "bias, weights": (PAIR, {"loss": "quadratic", "keep": "full", "weights": WEIGHTS, "ledger": True}),
    "names": (PAIR, {"loss": "quadratic", "labels": NAMES, "keep": "sketch"}),
    "logistic": (PAIR, {"loss": sfu.make_loss("logistic", class_weights="balanced"), "tolerance": 1e-12}),
    "softmax": (PAIR, {"loss": "softmax", "tolerance": 1e-12, "keep": "full"}),
    "quadratic of four": (WORLD, {"loss": "quadratic", "keep": "full", "l2": 1e-6}),
    "softmax of four": (WORLD, {"loss": "softmax", "tolerance": 1e-11, "weights": WEIGHTS}),
}
NAN = FEATURES.where(FEATURES > -1, float("nan"))


def fitted(part: slice, case: dict[str, Any], group: Any = None) -> LinearHead:
    own = ORDER[part]
    about = {"l2": 1e-2, "labels": LABELS, "features": FEATURES} | case
    given = {name: about.pop(name)[own] for name in ("features", "labels", "weights") if name in about}
    return sfu.fit(given.pop("features"), given.pop("labels"), group=group, **given, **about)


def numbers(head: LinearHead) -> dict[str, Any]:
    """Return all that is in a head, as plain values and arrays."""
    tensors = {"parameters": head.parameters_CE, "gradient": head.gradient_CE, **head.kept.as_secrets()}
    plain = {
        "n_train": head.n_train,
        "weight": head.weight,
        "classes": head.recipe.classes,
        "loss": head.loss.as_json(),
    }
    return {name: one.numpy() for name, one in tensors.items()} | plain | head.kept.as_json()


def message(call: Callable[[], object]) -> str:
    try:
        call()
    except SfuError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def late(rank: int, group: Any) -> object:
    with limit_time(0 if rank == 1 else None):
        return fitted(slice(0, 50), {"loss": "quadratic"}, group)


def descended(rank: int, group: Any) -> object:
    config = LinearSettings(training=Training.adam)
    where = {"device": torch.device("cpu"), "dtype": torch.float64, "seed": 0}
    return train_head(FEATURES, LABELS, 4, config, sfu.make_loss("softmax"), ranks=Ranks(group), **where)


def another_call(rank: int, group: Any) -> object:
    if rank == 0:
        return fitted(slice(0, 50), {"loss": "quadratic"}, group)
    ranks = Ranks(group)
    with ranks.together():
        return ranks.everywhere(True)


FAULTS: dict[str, tuple[Callable[[int, Any], object], str, str]] = {
    "a value": (
        lambda rank, group: fitted(slice(0, 50), {"loss": "quadratic", "features": NAN if rank else FEATURES}, group),
        "RankError: rank 1 of 2 has failed, so all of them stop: the features have NaN", "DataError: the features have",
    ),
    "a setting": (
        lambda rank, group: fitted(slice(0, 50), {"loss": "quadratic", "l2": 0.2 if rank else 0.1}, group),
        *["ConfigError: the processes of the group differ in l2: rank 0 has 0.1 and rank 1 has 0.2"] * 2,
    ),
    "the width": (
        lambda rank, group: fitted(slice(0, 50), {"loss": "quadratic", "features": FEATURES[:, rank:]}, group),
        *["ConfigError: the processes of the group differ in features: rank 0 has 12 and rank 1 has 11"] * 2,
    ),
    "names": (
        lambda rank, group: fitted(slice(0, 50), {"loss": "quadratic", "labels": NAMES if rank else LABELS}, group),
        *["ConfigError: the processes of the group differ in labels: rank 0 has numbers and rank 1 has names"] * 2,
    ),
    "no rows": (
        lambda rank, group: fitted(slice(0, 0), {"loss": "quadratic"}, group),
        *["DataError: no process of the group has a row"] * 2,
    ),
    "late": (
        late, "RankError: rank 1 of 2 has failed, so all of them stop: time_limit=0", "TimeLimitError: time_limit=0",
    ),
    "gradient descent": (
        descended, *["ConfigError: rows of several processes are only trained on with head.training=exact"] * 2,
    ),
    "another call": (
        another_call, *["RankError: the ranks do not run in step: rank 0 is at an exchange of settings, and rank"] * 2,
    ),
}  # fmt: skip


def work(rank: int) -> Iterator[dict[str, Any]]:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    pair = torch.distributed.new_group([0, 1])
    heads, faults = {}, {}
    for name, (bounds, case) in TRAINED.items():
        if rank < len(bounds) - 1:
            part = slice(bounds[rank], bounds[rank + 1])
            heads[name] = numbers(fitted(part, case, "world" if bounds is WORLD else pair))
    for name, (call, *_) in FAULTS.items():
        faults[name] = message(lambda call=call: call(rank, pair))
        if rank < 2:
            torch.distributed.barrier(pair)
    hasty = torch.distributed.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        faults["too slow"] = message(lambda: fitted(slice(0, 50), {"loss": "quadratic"}, hasty))
    elif rank == 1:
        time.sleep(1.5)
    yield {"heads": heads, "faults": faults}
    if rank == 3:
        Rows.moments = lambda self: os._exit(1)
    yield message(lambda: fitted(slice(0, 50), {"loss": "quadratic"}, "world"))


def check_heads(told: list[list[Any]], name: str) -> None:
    bounds, case = TRAINED[name]
    wanted = numbers(fitted(slice(None), case))
    assert wanted["n_train"] == 400
    for rank in range(len(bounds) - 1):
        found = told[rank][0]["heads"][name]
        assert found.keys() == wanted.keys()
        for part, value in wanted.items():
            np.testing.assert_array_equal(found[part], told[0][0]["heads"][name][part])  # the same bits everywhere
            if part.startswith("sketch"):  # whose codes are whole numbers, which rounding may turn into the next
                np.testing.assert_allclose(found[part].astype(float), value.astype(float), rtol=1e-6, atol=1)
            elif isinstance(value, np.ndarray | float):
                np.testing.assert_allclose(found[part], value, rtol=1e-10, atol=1e-10, err_msg=f"{name}, {part}")
            else:
                assert found[part] == value


ON_WINDOWS = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork server")


@pytest.mark.slow
@ON_WINDOWS
def test_two_and_four_processes(tmp_path: Path) -> None:
    """One start for all cases, because starting the processes is what takes long."""
    told = run_ranks(4, work, tmp_path)
    for name in TRAINED:
        check_heads(told, name)
    for name, (_, first, second) in FAULTS.items():
        assert told[0][0]["faults"][name].startswith(first)
        assert told[1][0]["faults"][name].startswith(second)
        assert "no group of torch.distributed that this process belongs to" in told[2][0]["faults"][name]
    assert told[0][0]["faults"]["too slow"].startswith(
        "RankError: rank 0 of 2 has lost the others: one has died, or has"
    )
    assert len(told[3]) == 1  # it has died
    for rank in range(3):
        assert told[rank][1].startswith(f"RankError: rank {rank} of 4 has lost the others: one has died")


def example(rank: int) -> Iterator[str]:
    runpy.run_path("train.py", run_name="__main__")
    yield "done"


@ON_WINDOWS
def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(page.split("```python\n")[1].split("```")[0])
    assert run_ranks(2, example, tmp_path) == [["done"], ["done"]]
    features, labels = load_digits(return_X_y=True)
    retrained = sfu.fit(features[50:], labels[50:], l2=1.0, loss="quadratic")
    unlearned = sfu.load_head(tmp_path / "head")
    torch.testing.assert_close(unlearned.parameters_CE, retrained.parameters_CE, rtol=1e-10, atol=1e-10)
    assert unlearned.n_train == 1747


def on_gpu(rank: int) -> Iterator[dict[str, Any]]:
    torch.distributed.init_process_group("nccl")
    yield numbers(fitted(slice(None), TRAINED["bias, weights"][1], "world"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_process_with_nccl_trains_on_its_gpu(tmp_path: Path) -> None:
    (found,) = run_ranks(1, on_gpu, tmp_path)
    wanted = numbers(fitted(slice(None), TRAINED["bias, weights"][1]))
    np.testing.assert_allclose(found[0]["parameters"], wanted["parameters"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("group", ["world", "all", 3])
def test_a_group_needs_torch_distributed(group):
    with pytest.raises(ConfigError, match="has not been started in this process"):
        sfu.fit(FEATURES, LABELS, l2=1e-2, loss="quadratic", group=group)
