from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from sfu.reporting.pictures.bars import save_bar_plot
from sfu.reporting.pictures.choose import along, pictures_of, save_sweep_plot
from sfu.reporting.pictures.curves import numeric_key
from sfu.reporting.pictures.drawing import COLOURS, png_of
from sfu.reporting.pictures.plane import plane_figure, plane_points
from sfu.reporting.pictures.trade_off import save_trade_off_plot
from sfu.results.aggregate import aggregate
from sfu.unlearning.tuning import ORACLE

from .picture_checks import overlapping_texts, shown_ticks
from .samples import catastrophic_run, good_run, sweep_runs, ten_methods, tuned_run, without_retrained


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would have been saved, for a look inside; painting them is left to a few tests."""
    figures: list[Figure] = []

    def save(figure: Figure, target: object, **_: object) -> None:
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", save)
    return figures


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_suffix_chooses_the_format(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = save_bar_plot(good_run(), tmp_path / "new" / f"result.{suffix}")
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize("make", [good_run, catastrophic_run, without_retrained, ten_methods])
def test_all_labels_are_there_inside_and_apart(tmp_path: Path, drawn: list[Figure], make: Any) -> None:
    metrics = make()
    save_bar_plot(metrics, tmp_path / "result.png")
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
    save_bar_plot(metrics, tmp_path / "result.png")
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
    save_bar_plot(good_run(), tmp_path / "result.png")
    assert drawn[0].axes[1].get_xscale() == "linear"


@pytest.mark.parametrize(
    "metrics", [{}, {"rows": {"x": {}}}, {"rows": {"a$b$": {"test_accuracy": 50, "distance": 1e12}}}]
)
def test_odd_input_still_draws(tmp_path: Path, metrics: dict[str, Any]) -> None:
    assert save_bar_plot(metrics, tmp_path / "result.png").stat().st_size > 1000


def test_sweep_curves(tmp_path: Path, drawn: list[Figure]) -> None:
    save_sweep_plot(aggregate(sweep_runs()), tmp_path / "sweep.png")
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
    assert numeric_key(total) is None
    save_sweep_plot(total, tmp_path / "sweep.png")
    assert drawn[0].axes[0].get_yticklabels()[0].get_text() == "forget.fraction = 0.05\nloss = a"


@pytest.mark.parametrize("runs", [[], [({"seed": "0"}, None)], [({"l2": "0", "seed": "0"}, without_retrained())]])
def test_odd_sweeps_still_draw(tmp_path: Path, runs: Any) -> None:
    assert save_sweep_plot(aggregate(runs), tmp_path / "sweep.png").stat().st_size > 1000


def test_curves_follow_one_number_while_all_else_is_the_same() -> None:
    runs = [({**overrides, "l2": l2}, found) for l2 in ("0.1", "1") for overrides, found in sweep_runs()]
    total = aggregate(runs)
    parts = list(along(total, "forget.fraction"))
    assert [(at, part.n_runs, len(part.failed)) for at, part in parts] == [
        ({"l2": "0.1"}, 9, 1),
        ({"l2": "1"}, 9, 1),
    ]
    assert [group.overrides for group in parts[0][1].groups] == [
        {"forget.fraction": f} for f in ("0.05", "0.1", "0.15")
    ]
    kinds = [picture.kind for picture in pictures_of(total)[0]]
    assert kinds == ["curve", "curve", "plane", "bars"]
    assert [p.kind for p in pictures_of(total, ["l2"])[0]] == ["curve"] * 3 + ["plane", "bars"]
    assert list(along(total, "seed")) == []
    many, left_out = pictures_of(aggregate([({**o, "x": str(i)}, m) for i in range(8) for o, m in sweep_runs()]))
    assert len([picture for picture in many if picture.kind == "curve"]) == 6
    assert len(left_out) == 8 + 3 - 6
    assert left_out[0].startswith("Not drawn: Test accuracy and distance to Retrained against")


def test_the_plane_has_every_point_and_its_spread() -> None:
    total = aggregate(sweep_runs(), spread="stderr")
    points = plane_points(total)["unlearned_minus"]
    assert points[1][:2] == (pytest.approx(0.305 * 1.12), pytest.approx(-0.1 + 0.12))
    assert points[1][2] == pytest.approx(0.305 * 0.02 / 3**0.5)
    (axes,) = plane_figure(total, "title").axes
    assert len(axes.get_legend_handles_labels()[1]) == 6
    assert plane_points(aggregate([({}, without_retrained())])) == {}


def test_small_pngs_leave_the_colours_of_the_methods_apart() -> None:
    table = aggregate(sweep_runs(), spread="stderr")
    with Image.open(io.BytesIO(png_of(plane_figure(table, "title")))) as picture:
        found = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}
    for colour in COLOURS[: len(table.methods)]:
        wanted = bytes.fromhex(colour[1:])
        assert min(max(abs(a - b) for a, b in zip(wanted, other, strict=True)) for other in found) <= 12, colour


@pytest.mark.parametrize("narrow", [False, True])
def test_no_label_covers_another_and_none_leaves_the_picture(narrow: bool) -> None:
    found, _ = pictures_of(aggregate(sweep_runs(), spread="stderr"))
    for picture in [p for kind in ("curve", "plane", "bars") for p in found if p.kind == kind][:3]:
        figure = picture.draw(narrow)
        assert overlapping_texts(figure) == []
        assert figure.get_figwidth() <= (4.4 if narrow else 13.1)
        for axes in figure.axes:
            for text in (*shown_ticks(axes), axes.xaxis.label, axes.yaxis.label):
                if not text.get_text():
                    continue
                assert text.get_window_extent().x0 >= -1
                assert text.get_window_extent().x1 <= figure.bbox.width + 1


def test_the_bar_figure_draws_marked_rows(tmp_path: Path) -> None:
    assert save_bar_plot(tuned_run(ORACLE), tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_the_trade_off_picture_marks_retrained_and_ours_and_draws_every_path(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    paths = {
        "retrained": {"forget_accuracy": [73.8], "test_accuracy": [73.7]},
        "neg_grad": {"forget_accuracy": [75.0, 70.0, 40.0], "test_accuracy": [73.8, 70.0, 45.0]},
        "unlearned_minus": {"forget_accuracy": [73.9], "test_accuracy": [73.7]},
    }
    (tmp_path / "trade_off.json").write_text(json.dumps(paths))
    save_trade_off_plot(tuned_run(ORACLE), tmp_path / "trade_off.png")
    lines = drawn[0].axes[0].lines
    marks = {line.get_label(): line.get_marker() for line in lines}
    assert marks["retrained (retained data)"] == "*"
    assert marks["unlearned_minus"] == "D"
    assert "neg_grad (tuned on Retrained)" in marks
    assert [75.0, 70.0, 40.0] in [list(line.get_xdata()) for line in lines]
