from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from sfu.reporting.pictures.choose import along, pictures_of, save_sweep_plot
from sfu.reporting.pictures.curves import curve_figure, numeric_key
from sfu.reporting.pictures.drawing import LOOKS, NARROW_INCHES, OTHERS, WIDE_INCHES, look_of, png_of
from sfu.reporting.pictures.gaps import gap_figure, save_gap_plot
from sfu.reporting.pictures.grid import grid_figure, named_key
from sfu.reporting.pictures.plane import plane_figure, plane_points
from sfu.reporting.pictures.trade_off import save_trade_off_plot
from sfu.results.aggregate import aggregate, table_of_run
from sfu.unlearning.tuning import ORACLE

from .picture_checks import least_difference, markers_of, text_faults
from .samples import (
    catastrophic_run,
    forgotten_class,
    good_run,
    make_row,
    sweep_runs,
    tuned_run,
    twenty_methods,
    without_retrained,
)


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
    path = save_gap_plot(good_run(), tmp_path / "new" / f"result.{suffix}")
    assert path.read_bytes().startswith(magic)


def one_method() -> dict[str, Any]:
    return {"rows": {"unlearned_minus": good_run()["rows"]["unlearned_minus"]}}


def three_methods() -> dict[str, Any]:
    return {"rows": {name: good_run()["rows"][name] for name in ("original", "retrained", "closed_form")}}


@pytest.mark.parametrize("make", [one_method, three_methods, without_retrained, twenty_methods])
def test_the_picture_of_a_run_names_every_row(tmp_path: Path, drawn: list[Figure], make: Any) -> None:
    metrics = make()
    save_gap_plot(metrics, tmp_path / "result.png")
    (figure,) = drawn
    assert text_faults(figure) == []
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(metrics["rows"])


def texts_of(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_panels_show_distances_and_gaps_to_retrained(tmp_path: Path, drawn: list[Figure]) -> None:
    metrics = catastrophic_run()
    save_gap_plot(metrics, tmp_path / "result.png")
    rows = list(metrics["rows"].values())
    keys = ("distance", "test_gap", "remain_gap", "forget_gap", "mia_gap")
    for key, axes in zip(keys, drawn[0].axes, strict=True):
        (bars,) = [found for found in axes.containers if hasattr(found, "patches")]
        assert [bar.get_width() for bar in bars.patches] == [row[key] for row in rows], key
    distance, test, *_ = drawn[0].axes
    assert distance.get_xscale() == "symlog"
    assert texts_of(distance) == ["1.000", "0", "0", "0.305", "0.351", "801 worse"]
    assert texts_of(test) == ["+0.1", "73.7 %", "+0.0", "-0.1", "+0.0", "-61.7"]
    accuracies = [axes.get_xlim() for axes in drawn[0].axes[1:4]]
    assert accuracies == [test.get_xlim()] * 3  # one scale, so that lengths compare


def test_without_retrained_the_picture_shows_accuracies(tmp_path: Path, drawn: list[Figure]) -> None:
    save_gap_plot(without_retrained(), tmp_path / "result.png")
    assert [axes.get_xlabel() for axes in drawn[0].axes] == ["per cent"] * 4
    assert texts_of(drawn[0].axes[0])[0] == "73.8"


def test_distance_stays_linear_while_small(tmp_path: Path, drawn: list[Figure]) -> None:
    save_gap_plot(good_run(), tmp_path / "result.png")
    assert drawn[0].axes[0].get_xscale() == "linear"


def test_neither_a_withheld_step_nor_harm_looks_like_a_success(tmp_path: Path, drawn: list[Figure]) -> None:
    metrics = catastrophic_run()
    metrics["rows"]["closed_form"] |= {"applied": False, "distance": 1.0}
    save_gap_plot(metrics, tmp_path / "result.png")
    distance = drawn[0].axes[0]
    bars = dict(
        zip(metrics["rows"], next(c.patches for c in distance.containers if hasattr(c, "patches")), strict=True)
    )
    looks = {name: (to_hex(bar.get_facecolor()), bar.get_linestyle(), bar.get_hatch()) for name, bar in bars.items()}
    assert looks["unlearned_minus"] == (look_of("unlearned_minus").colour.lower(), "solid", None)
    assert looks["closed_form"] == ("#ffffff", "--", None)
    assert looks["unlearned_minus_paper"][0] == "#ffffff"
    assert "x" in looks["unlearned_minus_paper"][2]
    assert "/" in looks["unlearned_plus"][2]
    assert texts_of(distance)[4:] == ["1.000 not applied", "801 worse"]
    filled = dict(zip(metrics["rows"], [whole for *_, whole in markers_of(distance)], strict=True))
    assert [name for name, whole in filled.items() if not whole] == ["closed_form"]
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert legend == ["source-free", "sees more than the forget set", "step not applied", "worse than doing nothing"]
    plane = plane_figure(table_of_run(metrics), "title").axes[0]
    assert [colour for colour, _, whole in markers_of(plane) if not whole] == [look_of("closed_form").colour]
    assert "closed_form (not applied)" in texts_of(plane)


@pytest.mark.parametrize(
    "metrics", [{}, {"rows": {"x": {}}}, {"rows": {"a$b$": {"test_accuracy": 50, "distance": 1e12}}}]
)
def test_odd_input_still_draws(tmp_path: Path, metrics: dict[str, Any]) -> None:
    assert save_gap_plot(metrics, tmp_path / "result.png").stat().st_size > 1000


def test_rows_have_one_look_in_every_picture_whatever_stands_beside_them(tmp_path: Path, drawn: list[Figure]) -> None:
    many = twenty_methods()
    many["rows"] = dict(reversed(many["rows"].items()))  # looks do not depend on the order
    steps = {name: {"test_accuracy": [70.0], "forget_accuracy": [70.0]} for name in many["rows"]}
    (tmp_path / "trade_off.json").write_text(json.dumps(steps))
    save_trade_off_plot(many, tmp_path / "trade_off.png")
    save_gap_plot(many, tmp_path / "result.png")
    swept = aggregate([({"head.l2": l2}, many) for l2 in ("0.1", "1")])
    drawn += [plane_figure(swept, "title"), curve_figure(swept, "head.l2", "title")]
    wanted = {(look.colour, look.marker) for look in LOOKS.values()}
    assert len({marker for _, marker in wanted}) == len({colour for colour, _ in wanted}) == 5
    for figure in drawn:
        found = {(colour, marker) for colour, marker, _ in markers_of(figure.axes[0])}
        assert found == wanted | {(OTHERS.colour, OTHERS.marker)}
    for figure in (drawn[0], *drawn[2:]):
        handles = {text.get_text(): handle for handle, text in zip(
            figure.legends[0].legend_handles, figure.legends[0].get_texts(), strict=True
        )}  # fmt: skip
        shown = {name.split(" (")[0]: (handle.get_color(), handle.get_marker()) for name, handle in handles.items()}
        assert shown == {name: (look.colour, look.marker) for name, look in LOOKS.items()}


def test_colour_blind_readers_tell_the_rows_apart() -> None:
    """A difference of 10 is seen at a glance; see ``least_difference``."""
    assert least_difference([OTHERS.colour, *(look.colour for look in LOOKS.values())]) > 15


def test_sweep_curves(tmp_path: Path, drawn: list[Figure]) -> None:
    save_sweep_plot(aggregate(sweep_runs()), tmp_path / "sweep.png")
    accuracy, enlarged, distance = drawn[0].axes
    lines = [line for line in accuracy.lines if line.get_color() == OTHERS.colour and line.get_marker() == "None"]
    (closed_form,) = lines
    dashed = {
        line.get_color() for line in accuracy.lines if line.get_marker() == "None" and line.get_linestyle() == "--"
    }
    assert dashed == {look_of(name).colour for name in ("retrained", "unlearned_plus")}
    assert list(closed_form.get_xdata()) == [0.05, 0.1, 0.15]
    assert list(closed_form.get_ydata()) == pytest.approx([74.0, 74.9, 75.8])
    assert texts_of(accuracy) == []  # named once, where its curve is enlarged
    assert texts_of(enlarged) == texts_of(distance) == ["closed_form"]
    assert len(accuracy.collections) == 6  # a band for each method
    low, high = enlarged.get_ylim()
    assert low > 70
    assert high < 80
    assert distance.get_yscale() == "symlog"


def test_sweep_over_a_word_or_over_two_keys_draws_gaps(tmp_path: Path, drawn: list[Figure]) -> None:
    runs = [({**overrides, "loss": "ab"[index % 2]}, found) for index, (overrides, found) in enumerate(sweep_runs())]
    total = aggregate(runs)
    assert numeric_key(total) is None
    save_sweep_plot(total, tmp_path / "sweep.png")
    assert drawn[0].texts[0].get_text() == "forget.fraction = 0.05, loss = a; n = 2 (seed 0, 2)"


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
    assert kinds == ["curve", "curve", "plane", "gaps"]
    assert [p.kind for p in pictures_of(total, ["l2"])[0]] == ["curve"] * 3 + ["plane", "gaps"]
    assert list(along(total, "seed")) == []
    many, left_out = pictures_of(aggregate([({**o, "x": str(i)}, m) for i in range(8) for o, m in sweep_runs()]))
    assert len([picture for picture in many if picture.kind == "curve"]) == 6
    assert len(left_out) == 8 + 3 - 6
    assert left_out[0].startswith("Not drawn: Test accuracy and distance to Retrained against")


def test_the_plane_has_every_point_and_its_spread() -> None:
    total = aggregate(sweep_runs(), spread="stderr")
    point = plane_points(total)["unlearned_minus"][1]
    assert point[:2] == (pytest.approx(0.305 * 1.12), pytest.approx(-0.1 + 0.12))
    assert point.distance_spread == pytest.approx(0.305 * 0.02 / 3**0.5)
    (axes,) = plane_figure(total, "title").axes
    assert axes.get_legend_handles_labels()[1] == [name for name in total.methods if name in LOOKS]
    assert texts_of(axes) == ["closed_form"]
    assert len(markers_of(axes)) == 6 * 3
    assert plane_points(aggregate([({}, without_retrained())])) == {}


def test_small_pngs_leave_the_colours_of_the_methods_apart() -> None:
    table = aggregate(sweep_runs(), spread="stderr")
    with Image.open(io.BytesIO(png_of(plane_figure(table, "title")))) as picture:
        found = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}
    for colour in [OTHERS.colour, *(look.colour for look in LOOKS.values())]:
        wanted = bytes.fromhex(colour[1:])
        assert min(max(abs(a - b) for a, b in zip(wanted, other, strict=True)) for other in found) <= 12, colour


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    ("make", "kinds"), [(three_methods, ["curve", "plane", "gaps"]), (twenty_methods, ["curve", "plane"])]
)
def test_no_label_covers_another_and_none_leaves_the_picture(make: Any, kinds: list[str], narrow: bool) -> None:
    found, _ = pictures_of(aggregate([({"head.l2": l2}, make()) for l2 in ("0.1", "1")]))
    for picture in found[: len(kinds)]:
        figure = picture.draw(narrow)
        assert text_faults(figure) == [], picture.kind
        assert figure.get_figwidth() == (NARROW_INCHES if narrow else WIDE_INCHES)
    assert [picture.kind for picture in found][: len(kinds)] == kinds


def crowded() -> dict[str, Any]:
    """More rows than the plane has room for, with long names."""
    metrics = forgotten_class()
    for index in range(25):
        metrics["rows"][f"variant_{index}_of_{'x' * 50}"] = make_row(73.7, 74.4, 73.8, 50.1, 0.3 + index / 1e6)
    return metrics


def test_what_has_no_room_is_left_out() -> None:
    plane = plane_figure(table_of_run(crowded()), "title", narrow=True)
    assert text_faults(plane) == []
    assert 5 < len(plane.axes[0].texts) < 25
    settings = [{"head.l2": str(l2), "dataset.path": "x" * 200 + str(l2)} for l2 in range(3)]
    gaps = gap_figure(aggregate([(setting, crowded()) for setting in settings]), "title", narrow=True)
    assert text_faults(gaps) == []
    assert "and 2 more settings, in the table" in [text.get_text() for text in gaps.texts]


def test_a_row_tuned_on_retrained_says_so(tmp_path: Path, drawn: list[Figure]) -> None:
    save_gap_plot(tuned_run(ORACLE), tmp_path / "gaps.png")
    assert "neg_grad\n(tuned on Retrained)" in [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]


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
    panel = drawn[0].axes[0]
    assert texts_of(panel) == ["neg_grad (tuned on Retrained)"]
    assert panel.get_legend_handles_labels()[1] == ["retrained (retained data)", "unlearned_minus"]
    assert [75.0, 70.0, 40.0] in [list(line.get_xdata()) for line in panel.lines]
    assert text_faults(drawn[0]) == []


def kinds_of_requests(n_kinds: int = 4) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """Runs of several kinds of requests, of which every second step was not applied."""
    runs = []
    for index, kind in enumerate(["random", "class", "hardest", "part_of_class"][:n_kinds]):
        run = good_run()
        run["rows"]["closed_form"] |= {"distance": 0.3 + index, "applied": index % 2 == 0}
        runs.append(({"request": kind}, run))
    return runs


def test_a_sweep_over_names_is_a_grid_of_all_source_free_methods(tmp_path: Path) -> None:
    table = aggregate(kinds_of_requests())
    assert named_key(table) == "request"
    figure = grid_figure(table, "request", "title")
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert "closed_form" in names
    assert not {"original", "retrained", "unlearned_plus"} & set(names)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["random", "class", "hardest", "part of\nclass"]
    texts = [text.get_text() for text in axes.texts]
    line = names.index("closed_form") * 4
    assert texts[line : line + 4] == ["0.300", "(1.300)", "2.300", "(3.300)"]
    shades = axes.images[0].get_array()[names.index("closed_form")]
    assert shades[0] == pytest.approx(-0.7)
    assert 0 < shades[1] < shades[2] < shades[3] < 1
    for narrow in (False, True):
        assert text_faults(grid_figure(table, "request", "title", narrow)) == []
    assert "grid" in [picture.kind for picture in pictures_of(table)[0]]
    assert save_sweep_plot(table, tmp_path / "sweep.png").stat().st_size > 1000


def test_two_names_or_a_number_make_no_grid() -> None:
    assert named_key(aggregate(kinds_of_requests(2))) is None
    assert named_key(aggregate(sweep_runs())) is None
