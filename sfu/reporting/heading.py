"""One line that says what was forgotten, from what, under which settings."""

from __future__ import annotations

from sfu.reporting import format as fmt
from sfu.reporting.columns import Metrics


def _what(metrics: Metrics) -> str:
    forget = (metrics.get("run") or {}).get("forget") or {}
    kind = forget.get("kind")
    if kind == "classes" and forget.get("classes"):
        classes = [str(label) for label in forget["classes"]]
        shown = ", ".join(classes[:8]) + (f" and {len(classes) - 8} more" if len(classes) > 8 else "")
        return f"class{'es' if len(classes) > 1 else ''} {shown}"
    if kind == "fraction" and fmt.is_number(forget.get("fraction")):
        return f"random {100 * forget['fraction']:g} %"
    return {"indices": "chosen by index", "files": "chosen by file name"}.get(str(kind), "")


def headline(metrics: Metrics) -> str:
    """For example ``digits: forgot 144 of 1437 examples (random 10 %), softmax, l2 0.0005, seed 0``."""
    run = metrics.get("run") or {}
    data, head, seeds = run.get("data") or {}, run.get("head") or {}, run.get("seeds") or {}
    n_forget, n_train = data.get("n_forget"), data.get("n_train")
    parts = []
    if n_forget is not None:
        parts.append(f"forgot {n_forget}" + (f" of {n_train} examples" if n_train is not None else ""))
        if what := _what(metrics):
            parts[-1] += f" ({what})"
    if (loss := (head.get("loss") or {}).get("name")) not in (None, "quadratic"):
        parts.append(loss)
    if fmt.is_number(head.get("l2")):
        parts.append(f"l2 {head['l2']:g}")
    if seeds.get("seed") is not None:
        parts.append(f"seed {seeds['seed']}")
    name = str(data.get("name") or run.get("name") or "run")
    if backbone := (data.get("backbone") or {}).get("name"):
        name += f" through {backbone}"
    return f"{name}: {', '.join(parts)}" if parts else name


def machine_line(metrics: Metrics) -> str:
    """For example ``cpu, float64, 12.3 s``; empty when nothing is known."""
    run = metrics.get("run") or {}
    parts = [str(run[key]) for key in ("device", "dtype") if run.get(key)]
    if fmt.is_number(run.get("seconds")):
        parts.append(f"{fmt.seconds(run['seconds'])} s")
    return ", ".join(parts)
