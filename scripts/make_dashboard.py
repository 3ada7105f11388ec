"""Make the W&B workspace for sfu's runs: distance first, then accuracy, the attack, what was predicted, time, tables.

    python scripts/make_dashboard.py --dry-run                 # print the workspace as JSON; no login, no network
    python scripts/make_dashboard.py --entity ME --project sfu # save it (pip install 'sfu[dashboard]', wandb login)

The panels are plain data below; the names of their metrics are those of sfu/reporting/loggers/content.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

METHODS = ("original", "retrained", "unlearned_plus", "unlearned_minus", "closed_form", "unlearned_minus_paper")
FIT = ("unlearned_minus", "closed_form")


@dataclass(frozen=True)
class Panel:
    """One panel: bars of several metrics, a scatter of two, or the media of one."""

    kind: str
    title: str
    metrics: tuple[str, ...]


def rows(metric: str, methods: tuple[str, ...] = METHODS) -> tuple[str, ...]:
    return tuple(f"rows/{method}/{metric}" for method in methods)


PANELS: dict[str, tuple[Panel, ...]] = {
    "How close to Retrained": (
        Panel("bars", "Distance to Retrained (0 Retrained, 1 nothing done)", rows("distance")),
        Panel("bars", "Agreement with Retrained's predictions, %", rows("agreement")),
        *(
            Panel("scatter", f"{name}: distance, gap in accuracy", (f"rows/{name}/distance", f"rows/{name}/test_gap"))
            for name in FIT
        ),
    ),
    "Accuracy and membership inference": (
        Panel("bars", "Test accuracy, %", rows("test_accuracy")),
        Panel("bars", "Remaining accuracy, %", rows("remain_accuracy")),
        Panel("bars", "Forget accuracy, %", rows("forget_accuracy")),
        Panel("bars", "Membership attack, % (read against retrained)", rows("mia")),
    ),
    "Known beforehand": tuple(
        Panel(
            "scatter", f"{name}: gain predicted from the forget set, and measured",
            (f"rows/{name}/predicted_distance_gain", f"rows/{name}/measured_distance_gain"),
        )
        for name in FIT
    ),
    "Cost": (
        Panel("bars", "Seconds of each method", rows("seconds")),
        Panel("bars", "Seconds of each stage", ("stages/prepare/seconds", "stages/evaluate/seconds", "run/seconds")),
        Panel("bars", "Peak memory, MiB", rows("peak_memory_mb")),
    ),
    "Tables and pictures": (Panel("media", "Figure", ("figure",)), Panel("media", "All metrics", ("results",))),
}  # fmt: skip


def logged_names() -> set[str]:
    """Every metric that some panel shows."""
    return {name for panels in PANELS.values() for panel in panels for name in panel.metrics}


def workspace(entity: str, project: str, group_by: str | None) -> Any:
    """The workspace as wandb-workspaces has it."""
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    def panel_of(panel: Panel) -> Any:
        if panel.kind == "bars":
            grouped: dict[str, Any] = {} if group_by is None else {
                "groupby": reports.Config(group_by), "groupby_aggfunc": "mean", "groupby_rangefunc": "stderr",
            }  # fmt: skip
            return reports.BarPlot(title=panel.title, metrics=list(panel.metrics), **grouped)
        if panel.kind == "scatter":
            x, y = (reports.SummaryMetric(name) for name in panel.metrics)
            return reports.ScatterPlot(title=panel.title, x=x, y=y)
        return reports.MediaBrowser(title=panel.title, media_keys=list(panel.metrics))

    sections = [
        workspaces.Section(name=name, panels=[panel_of(panel) for panel in panels], is_open=True)
        for name, panels in PANELS.items()
    ]
    return workspaces.Workspace(
        entity=entity, project=project, name="sfu", sections=sections, auto_generate_panels=False
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entity", default="", help="account or team (needed to save)")
    parser.add_argument("--project", default="sfu", help="default: sfu")
    parser.add_argument("--group-by", metavar="KEY", help="average bars over runs by this setting, such as head.l2")
    parser.add_argument("--dry-run", action="store_true", help="print the JSON that would be saved")
    given = parser.parse_args(arguments)
    try:
        made = workspace(given.entity, given.project, given.group_by)
    except ImportError as error:
        sys.exit(f"make_dashboard: needs wandb-workspaces ({error}); pip install 'sfu[dashboard]'")
    if given.dry_run:
        print(json.dumps(made._to_model().model_dump(mode="json", by_alias=True, exclude_none=True), indent=2))
        return
    if not given.entity:
        sys.exit("make_dashboard: --entity is needed to save (or --dry-run)")
    made.save()
    print(f"saved: {made.url}")


if __name__ == "__main__":
    main()
