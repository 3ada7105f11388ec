from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from sfu.reporting import plot, sweep_plot
from sfu.reporting.aggregate import aggregate

from .samples import catastrophic_run, good_run, sweep_runs, ten_methods, without_retrained


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would have been saved, for a look inside; painting them is left to a few tests."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_suffix_chooses_the_format(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = plot.save_bar_plot(good_run(), tmp_path / "new" / f"result.{suffix}")
    assert path.read_bytes().startswith(magic)


def shown_ticks(axes: Any) -> list[Any]:
    """Tick labels within the limits; matplotlib keeps others that it does not draw."""
    (left, right), (low, high) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
    across = [text for text in axes.get_xticklabels() if left <= text.get_position()[0] <= right]
    return [*across, *(text for text in axes.get_yticklabels() if low <= text.get_position()[1] <= high)]


def overlapping_texts(figure: Figure) -> list[tuple[str, str]]:
    figure.draw_without_rendering()
    found = []
    boxes = [
        (text.get_text(), text.get_window_extent())
        for axes in figure.axes
        for text in [
            *axes.texts,
            *shown_ticks(axes),
            axes.title,
            axes.xaxis.label,
            axes.yaxis.label,
        ]
        if text.get_text() and text.get_visible()
    ]
    for index, (first, one) in enumerate(boxes):
        for second, two in boxes[index + 1 :]:
            width = min(one.x1, two.x1) - max(one.x0, two.x0)
            height = min(one.y1, two.y1) - max(one.y0, two.y0)
            if width > 1 and height > 3:  # bounding boxes hold some air above and below the letters
                found.append((first, second))
    return found


@pytest.mark.parametrize("make", [good_run, catastrophic_run, without_retrained, ten_methods])
def test_all_labels_are_there_inside_and_apart(tmp_path: Path, drawn: list[Figure], make: Any) -> None:
    metrics = make()
    plot.save_bar_plot(metrics, tmp_path / "result.png")
    (figure,) = drawn
    assert overlapping_texts(figure) == []
    labels = [label.get_text().split("\n")[0] for label in figure.axes[0].get_yticklabels()]
    assert labels == list(metrics["rows"])
    for axes in figure.axes:
        for text in [*axes.texts, *axes.get_yticklabels(), axes.xaxis.label]:
            box = text.get_window_extent()
            assert box.x0 >= 0
            assert box.x1 <= figure.bbox.width + 1


def test_bars_have_the_values(tmp_path: Path, drawn: list[Figure]) -> None:
    metrics = catastrophic_run()
    plot.save_bar_plot(metrics, tmp_path / "result.png")
    left, right = drawn[0].axes
    rows = list(metrics["rows"].values())
    keys = ("test_accuracy", "remain_accuracy", "forget_accuracy", "mia")
    bars = [container for container in left.containers if hasattr(container, "patches")]
    for key, container in zip(keys, bars, strict=True):
        assert [bar.get_width() for bar in container.patches] == [row[key] for row in rows]
    widths = [bar.get_width() for bar in right.patches]
    assert widths == [row["distance"] for row in rows]
    assert right.get_xscale() == "symlog"
    assert "801 worse" in [text.get_text() for text in right.texts]
    hatches = {container.patches[0].get_hatch() for container in bars}
    assert len(hatches) == 4  # told apart without colour


def test_distance_stays_linear_while_small(tmp_path: Path, drawn: list[Figure]) -> None:
    plot.save_bar_plot(good_run(), tmp_path / "result.png")
    assert drawn[0].axes[1].get_xscale() == "linear"


@pytest.mark.parametrize(
    "metrics", [{}, {"rows": {"x": {}}}, {"rows": {"a$b$": {"test_accuracy": 50, "distance": 1e12}}}]
)
def test_odd_input_still_draws(tmp_path: Path, metrics: dict[str, Any]) -> None:
    assert plot.save_bar_plot(metrics, tmp_path / "result.png").stat().st_size > 1000


def test_sweep_curves(tmp_path: Path, drawn: list[Figure]) -> None:
    plot.save_sweep_plot(aggregate(sweep_runs()), tmp_path / "sweep.png")
    accuracy, enlarged, distance = drawn[0].axes
    lines = {line.get_label(): line for line in accuracy.lines}
    assert list(lines["closed_form"].get_xdata()) == [0.05, 0.1, 0.15]
    assert list(lines["closed_form"].get_ydata()) == pytest.approx([74.0, 74.9, 75.8])
    assert len(accuracy.collections) == 6  # a band for each method
    low, high = enlarged.get_ylim()
    assert low > 70
    assert high < 80
    assert distance.get_yscale() == "symlog"


def test_sweep_over_a_word_or_over_two_keys_draws_bars(tmp_path: Path, drawn: list[Figure]) -> None:
    runs = [({**overrides, "loss": "ab"[index % 2]}, found) for index, (overrides, found) in enumerate(sweep_runs())]
    total = aggregate(runs)
    assert sweep_plot.numeric_key(total) is None
    plot.save_sweep_plot(total, tmp_path / "sweep.png")
    assert drawn[0].axes[0].get_yticklabels()[0].get_text() == "forget.fraction = 0.05\nloss = a"


@pytest.mark.parametrize("runs", [[], [({"seed": "0"}, None)], [({"l2": "0", "seed": "0"}, without_retrained())]])
def test_odd_sweeps_still_draw(tmp_path: Path, runs: Any) -> None:
    assert plot.save_sweep_plot(aggregate(runs), tmp_path / "sweep.png").stat().st_size > 1000
