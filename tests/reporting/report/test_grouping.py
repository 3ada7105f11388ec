from __future__ import annotations

from pathlib import Path

import pytest

from sfu.errors import ConfigError
from sfu.reporting.report.grouping import Configured, configured, flatten, merge_repeats, sections
from sfu.results.aggregate import ResultTable
from sfu.results.run_folder import read_run, run_folders

from ..samples import good_run, shifted
from .folders import config_with, write_run, write_sweep

NEUTRAL = ("logger", "threads", "methods", "dataset.root")


def read(root: Path) -> list[Configured]:
    return [configured(read_run(folder, with_config=True), NEUTRAL) for folder in run_folders(root)]


def distances(table: ResultTable, method: str = "closed_form") -> dict[str, float | None]:
    return {" ".join(group.overrides.values()): group.rows[method].mean("distance") for group in table.groups}


def test_flatten_writes_values_as_a_person_would() -> None:
    flat = flatten({"a": {"b": 1e-5, "c": None, "d": True, "e": [1, "x"], "f": {}}, "g": 0.1})
    assert flat == {"a.b": "1e-05", "a.c": "null", "a.d": "true", "a.e": "[1, x]", "a.f": "{}", "g": "0.1"}


def test_a_sweep_is_one_section_by_what_varied(tmp_path: Path) -> None:
    (section,) = sections(read(write_sweep(tmp_path)))
    assert section.title == "digits, by forget.fraction"
    assert (section.table.varied, section.table.over, section.table.spread) == (
        ["forget.fraction"], ["seed"], "stderr"
    )  # fmt: skip
    entry = section.table.groups[0].rows["original"]["test_accuracy"]
    assert (entry.mean, entry.n) == (pytest.approx(74.0), 3)  # 73.8, 74.0, 74.2
    assert entry.stderr == pytest.approx(0.2 / 3**0.5)


def test_the_configuration_counts_not_what_was_typed(tmp_path: Path) -> None:
    """A default that was spelled out is the same setting; one that came by a preset is another."""
    write_run(tmp_path / "a", good_run(), config_with(seed=0), overrides=("head.l2=0.0005",))
    write_run(tmp_path / "b", shifted(good_run(), 1.0), config_with(seed=1))
    write_run(tmp_path / "c", shifted(good_run(), 2.0), config_with(seed=0, head__l2=1e-3))
    (section,) = sections(read(tmp_path))
    assert [(g.overrides, g.n) for g in section.table.groups] == [
        ({"head.l2": "0.0005"}, 2),
        ({"head.l2": "0.001"}, 1),
    ]


def test_by_makes_a_table_for_each_setting_of_the_rest(tmp_path: Path) -> None:
    for l2 in (1e-4, 1e-3):
        for fraction in (0.1, 0.2):
            write_run(
                tmp_path / f"{l2}-{fraction}", good_run(), config_with(head__l2=l2, forget__fraction=fraction),
                overrides=(f"head.l2={l2}", f"forget.fraction={fraction}"),
            )  # fmt: skip
    found = sections(read(tmp_path), by=["head.l2"])
    assert [section.title for section in found] == [
        "digits, forget.fraction = 0.1, by head.l2",
        "digits, forget.fraction = 0.2, by head.l2",
    ]
    assert all([g.overrides for g in s.table.groups] == [{"head.l2": "0.0001"}, {"head.l2": "0.001"}]
               for s in found)  # fmt: skip
    (both,) = sections(read(tmp_path), over=["seed", "head.l2"])
    assert both.table.over == ["head.l2", "seed"]
    assert [g.n for g in both.table.groups] == [2, 2]


def test_two_experiments_are_never_averaged(tmp_path: Path) -> None:
    """By name where they have one, by their data where they have none; within one, data are settings."""
    for seed in (0, 1):
        for name in ("paper_table_1", "paper_table_2"):
            write_run(tmp_path / f"{name}{seed}", good_run(), config_with(seed=seed), overrides=(f"experiment={name}",))
        write_run(
            tmp_path / f"other{seed}", good_run(),
            config_with(seed=seed, dataset__name="features", dataset__path="a/b.npz"),
        )  # fmt: skip
    titles = [section.title for section in sections(read(tmp_path))]
    assert sorted(titles) == ["features b.npz", "paper_table_1: digits", "paper_table_2: digits"]
    for data in ("digits", "features"):
        for seed in (0, 1):
            write_run(
                tmp_path / "s" / f"{data}{seed}", good_run(),
                config_with(seed=seed, dataset__name=data, dataset__normalize_rows=data == "digits"),
                overrides=("experiment=s1", f"dataset={data}"),
            )  # fmt: skip
    (section,) = sections(read(tmp_path / "s"))
    assert [g.overrides for g in section.table.groups] == [
        {"dataset.name": "digits"},
        {"dataset.name": "features"},
    ]
    assert section.implied == {"dataset.name": ["dataset.normalize_rows"]}


def test_a_repeated_run_counts_once_the_later_one(tmp_path: Path) -> None:
    write_run(tmp_path / "old", shifted(good_run(), 5.0), started="2026-11-27T00:00:00+00:00")
    write_run(tmp_path / "new", good_run(), started="2026-11-28T00:00:00+00:00")
    write_run(tmp_path / "crashed", None, started="2026-11-29T00:00:00+00:00", state="failed", error="x")
    merged, repeated = merge_repeats(read(tmp_path))
    assert [one.run.folder.name for one in merged] == ["new"]
    assert sorted((old.folder.name, new.folder.name) for old, new in repeated) == [("crashed", "new"), ("old", "new")]
    (section,) = sections(merged)
    assert section.table.groups[0].n == 1
    assert distances(section.table) == {"": 0.351}


def test_rows_of_runs_that_differ_in_their_methods_alone_are_joined(tmp_path: Path) -> None:
    one, two = good_run(), good_run()
    one["rows"] = {"closed_form": one["rows"]["closed_form"]}
    two["rows"] = {"unlearned_minus": two["rows"]["unlearned_minus"]}
    write_run(tmp_path / "a", one, config_with(methods=["closed_form"]))
    write_run(tmp_path / "b", two, config_with(methods=["unlearned_minus"]), started="2026-11-28T00:00:00+00:00")
    merged, _ = merge_repeats(read(tmp_path))
    assert list(merged[0].run.metrics["rows"]) == ["closed_form", "unlearned_minus"]
    # one seed is one run, whatever rows were added to it
    write_run(tmp_path / "c", good_run(), config_with(variants={"x": {"settings": {"s": 1}}}))
    write_run(tmp_path / "d", good_run(), config_with(), overrides=("experiment=quick",))
    merged, _ = merge_repeats(read(tmp_path))
    assert sorted(one.run.folder.name for one in merged) == [
        "b",
        "d",
    ]


def test_a_variant_that_only_some_runs_have_does_not_split_and_its_settings_do(tmp_path: Path) -> None:
    for index, strength in enumerate((None, 0.1, 0.5)):
        variants = {} if strength is None else {"strong": {"settings": {"strength": strength}}}
        write_run(tmp_path / str(index), good_run(), config_with(variants=variants, seed=index))
    assert [g.n for g in sections(read(tmp_path)[:2])[0].table.groups] == [2]
    (section,) = sections(read(tmp_path))
    assert section.table.varied == ["variants.strong.settings.strength"]


def test_where_results_were_logged_and_how_fast_does_not_split(tmp_path: Path) -> None:
    for seed, changes in enumerate(({}, {"threads": 2}, {"logger__name": "wandb"}, {"dataset__root": "/x"})):
        write_run(tmp_path / str(seed), good_run(), config_with(seed=seed, **changes))
    (section,) = sections(read(tmp_path))
    assert [g.n for g in section.table.groups] == [4]
    assert "threads" not in read(tmp_path)[1].settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": ["head.l3"]}, r"--by head\.l3 is a setting that no run has\. Did you mean head\.l2\?"),
        ({"by": ["seed"]}, r"--by seed is averaged over"),
        ({"by": ["logger.name"]}, r"--by logger\.name does not tell runs apart, because it changes no result"),
        ({"over": ["seed", "zzz"]}, r"--over zzz is a setting that no run has\. The keys are those"),
        ({"by": ["head.l2"], "over": ["seed", "head.l2"]}, r"--by head\.l2 is averaged over"),
    ],
)
def test_keys_that_cannot_be(tmp_path: Path, options: dict[str, list[str]], message: str) -> None:
    write_run(tmp_path / "a", good_run())
    with pytest.raises(ConfigError, match=message):
        sections(read(tmp_path), **options)
