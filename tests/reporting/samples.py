"""Metrics dicts as a run would write them, with figures from DESIGN section 2."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

RETRAINED = (73.7, 74.4, 73.8, 50.1)


def make_row(
    test: float, remain: float, forget: float, mia: float, distance: float | None, access: str = "forget", **more: Any
) -> dict[str, Any]:
    row = {
        "test_accuracy": test,
        "remain_accuracy": remain,
        "forget_accuracy": forget,
        "test_gap": test - RETRAINED[0],
        "remain_gap": remain - RETRAINED[1],
        "forget_gap": forget - RETRAINED[2],
        "mia": mia,
        "mia_std": 0.4,
        "mia_gap": mia - RETRAINED[3],
        "distance": distance,
        "agreement": 99.2,
        "forget_kl": 0.0012,
        "retain_gradient_norm": 3.2e-5,
        "seconds": 0.42,
        "peak_memory_mb": 612.5,
        "access": access,
        "applied": True,
        "predicted_distance_gain": None,
        "measured_distance_gain": None,
        "details": {},
        "note": None,
        "isolation": None if access == "retained" else "process, files, network",
    }
    return {**row, **more}


def make_metrics(**rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": 1,
        "run": {
            "name": "digits",
            "sfu_version": "0.1.0",
            "versions": {"python": "3.11.7", "torch": "2.9.0"},
            "device": "cpu",
            "dtype": "float64",
            "started": "2026-11-27T23:08:00+00:00",
            "seconds": 12.34,
            "overrides": ["head.l2=5e-4"],
            "seeds": {"seed": 0, "split": 1, "training": 2, "perturbation": 3, "noise": 4, "evaluation": 5},
            "data": {
                "name": "digits",
                "path": None,
                "fingerprint": "ab12",
                "n_train": 1437,
                "n_forget": 144,
                "n_retain": 1293,
                "n_test": 360,
                "n_features": 64,
                "n_classes": 10,
            },
            "forget": {"kind": "fraction", "fraction": 0.1, "classes": None},
            "head": {
                "l2": 5e-4,
                "bias": True,
                "training": "exact",
                "gradient_norm": 1e-16,
                "loss": {"name": "quadratic", "class_weights": None, "target_scale": 1.0},
            },
        },
        "rows": rows,
    }


def good_run() -> dict[str, Any]:
    return make_metrics(
        original=make_row(73.8, 74.6, 74.8, 50.6, 1.0, "none"),
        retrained=make_row(*RETRAINED, 0.0, "retained"),
        unlearned_plus=make_row(*RETRAINED, 1.2e-15, "retained"),
        unlearned_minus=make_row(73.6, 74.3, 73.9, 50.3, 0.305, details={"rho": 1e-3, "solver_status": "converged"}),
        closed_form=make_row(73.7, 74.2, 73.8, 50.0, 0.351),
    )


def catastrophic_run() -> dict[str, Any]:
    metrics = good_run()
    metrics["rows"]["unlearned_minus_paper"] = make_row(
        12.0, 12.2, 11.9, 49.0, 801.3, note="loss fit: 1000 equations for 2080 unknowns"
    )
    return metrics


def without_retrained() -> dict[str, Any]:
    metrics = good_run()
    del metrics["rows"]["retrained"]
    for row in metrics["rows"].values():
        for key in ("test_gap", "remain_gap", "forget_gap", "mia_gap", "distance", "agreement"):
            row[key] = None
    return metrics


def ten_methods() -> dict[str, Any]:
    metrics = catastrophic_run()
    for index in range(4):
        metrics["rows"][f"unlearned_minus_p{250 * 2**index}_l2"] = make_row(
            65.0 + 2 * index, 66.0 + index, 64.0 + 2 * index, 51.0, 22.1 / 2**index
        )
    return metrics


def twenty_methods() -> dict[str, Any]:
    """A run with many rows close together, some that see more, some worse than nothing, and one withheld step."""
    metrics = catastrophic_run()
    found = {
        "neg_grad": (-0.1, 0.31, "forget"), "random_labels": (-0.6, 0.9, "forget"), "jit": (-1.2, 1.4, "forget"),
        "scrub": (-3.0, 3.0, "retained"), "ssd": (-20.0, 28.6, "retained"), "rescale": (0.1, 0.99, "forget"),
        "fisher": (0.1, 1.02, "forget"), "adversarial": (-61.0, 57.2, "forget"), "views": (-0.1, 0.5, "forget"),
        "certified_removal": (0.0, 0.45, "retained"), "curvature_sketch": (0.0, 0.2, "stored"),
        "fine_tune": (0.0, 0.352, "retained"), "retained_fine_tune": (0.1, 0.7, "retained"),
    }  # fmt: skip
    for name, (gap, distance, access) in found.items():
        accuracies = [accuracy + gap for accuracy in RETRAINED[:3]]
        metrics["rows"][name] = make_row(*accuracies, 50.4, distance, access)
    metrics["rows"]["gradient_step"] = metrics["rows"]["original"] | {"access": "forget", "applied": False}
    return metrics


def tuned_run(tuning: str | None) -> dict[str, Any]:
    return make_metrics(
        retrained=make_row(73.7, 74.4, 73.8, 50.1, 0.0, "retained", tuning=None),
        neg_grad=make_row(73.6, 74.3, 73.7, 50.2, 0.9, tuning=tuning),
        jit=make_row(73.0, 73.8, 73.0, 50.3, 1.4, tuning="source_free"),
    )


def shifted(metrics: dict[str, Any], points: float) -> dict[str, Any]:
    """The same run with every accuracy and distance of the source-free rows moved a little, as another seed would."""
    for row in metrics["rows"].values():
        row["test_accuracy"] += points
        if row["access"] == "forget" and row["distance"] is not None:
            row["distance"] *= 1 + points / 10
            row["test_gap"] += points / 10
    return metrics


def sweep_runs() -> list[tuple[dict[str, str], dict[str, Any] | None]]:
    runs: list[tuple[dict[str, str], dict[str, Any] | None]] = []
    for index, fraction in enumerate(("0.05", "0.1", "0.15")):
        for seed in range(3):
            metrics: dict[str, Any] | None = shifted(catastrophic_run(), 0.2 * seed + index)
            if fraction == "0.15" and seed == 2:
                metrics = {"error": "SingularHessianError: head.l2 = 0"}
            runs.append(({"forget.fraction": fraction, "seed": str(seed), "logger": "none"}, metrics))
    missing = runs[0][1]
    assert missing is not None
    del missing["rows"]["closed_form"]
    return runs


def forgotten_class() -> dict[str, Any]:
    """The widest numbers that can occur: forgetting a class takes its accuracy from 100 to 0."""
    metrics = make_metrics(
        original=make_row(100.0, 100.0, 100.0, 100.0, 1.0, "none"),
        retrained=make_row(0.0, 100.0, 0.0, 50.0, 0.0, "retained"),
        unlearned_plus_adam=make_row(100.0, 0.0, 100.0, 100.0, 1.0131, "retained", retain_gradient_norm=2.5e-11),
        unlearned_minus_paper=make_row(100.0, 100.0, 100.0, 100.0, 99999.0, seconds=12345.6, peak_memory_mb=123456.0),
    )
    for row in metrics["rows"].values():
        row.update(test_gap=-99.9, remain_gap=-99.9, forget_gap=100.0, mia_gap=-50.0)
    metrics["run"]["forget"] = {"kind": "classes", "fraction": None, "classes": [3, 5]}
    return metrics


def render(renderable: Any, width: int, encoding: str = "utf-8", color: bool = False) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    console = Console(
        width=width, file=file, color_system="standard" if color else None, force_terminal=color, legacy_windows=False
    )
    if callable(renderable):
        renderable(console)
    else:
        console.print(renderable)
    file.flush()
    return raw.getvalue().decode(encoding)
