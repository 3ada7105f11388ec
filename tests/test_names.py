"""Names that become names of files, and control characters that are shown instead of obeyed."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sfu.errors import ConfigError
from sfu.experiment import pipeline
from sfu.names import check_row_name, visible
from sfu.unlearning.rows import check_row_names, make_methods
from tests.experiment.cases import Probe, config_for

BAD = {
    "../../escaped": "contains '/'", "/absolute": "contains '/'", "a\\b": "contains '\\\\\\\\'", "c:d": "contains ':'",
    "": "is empty", " a": "ends with a space", ".hidden": "dot", "a.": "dot", "..": "dot", "nul": "device",
    "COM1.x": "device", "a\x1b[2J": "control character", "a\nb": "control character", "a\u202eb": "control character",
    "a\ud800": "control character", "x" * 101: "101 bytes", "ä" * 51: "102 bytes", "original": "that of another row",
    "Original": "upper and lower case", "closed_form": "that of another row", "RETRAINED": "upper and lower case",
}  # fmt: skip


@pytest.mark.parametrize(("name", "why"), BAD.items())
def test_a_variant_whose_name_cannot_be_a_file_is_refused_whether_it_is_used_or_not(name, why):
    for methods in ([name], ["retrained"]):
        config = config_for(variants={name: {"base": "closed_form"}}, methods=methods)
        with pytest.raises(ConfigError, match=rf"variants\..*: the name .*{why}.* Choose another name"):
            make_methods(config)


@pytest.mark.parametrize("name", ["../../escaped", "{folder}/absolute", "Original", "core-0123456789abcdef"])
def test_no_row_writes_outside_the_run_or_over_another_head(tmp_path, feature_file, name):
    """Rows that are given in Python are checked, too, before the data are loaded."""
    name = name.format(folder=tmp_path)
    folder = tmp_path / "deep" / "run"
    folder.mkdir(parents=True)
    config = config_for(feature_file)
    feature_file.write_bytes(b"")
    with pytest.raises(ConfigError, match="Choose another name"):
        pipeline.run(config, folder, methods={"retrained": Probe(), name: Probe()}, show_progress=False)
    assert not list(folder.iterdir())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "features.npz", "run"]


def test_rows_that_differ_in_case_or_in_how_letters_are_composed_are_one_file_on_some_systems():
    with pytest.raises(ConfigError, match="differs from the row 'a' in upper and lower case only"):
        check_row_names(["a", "b", "A"])
    with pytest.raises(ConfigError, match="differs from"):
        check_row_names(["\u00e9", "e\u0301"])
    check_row_names(["original", "a", "b", "v1.5", "[red]x", "gkt open", "-2", "日本", "می\u200cخواهم"])


@given(st.text())
@example("a\x00b\x7fc\x85d\u2028e\u2066f\U000e0001g\ud800")
def test_visible_text_holds_no_character_that_a_terminal_obeys(text):
    shown = visible(text)
    assert not [c for c in shown if ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u2028\u2029\u061c\u200e\u200f\ud800"]
    assert not [c for c in shown if "\u202a" <= c <= "\u202e" or "\u2066" <= c <= "\u2069"]
    assert shown.isprintable() or shown == visible(shown)
    if text.isprintable():
        assert shown == text


def test_visible_text_says_what_was_there():
    assert visible("a\x1b[31m\tb\r\n\u202ec\U000e0001") == "a\\x1b[31m\\tb\\r\\n\\u202ec\\U000e0001"
    assert visible("two\nlines\x07", keep="\n") == "two\nlines\\x07"
    assert visible("naïve 日本 👩\u200d🔬") == "naïve 日本 👩\u200d🔬"


@given(st.text(min_size=1, max_size=60))
def test_a_name_that_is_accepted_is_one_plain_file(tmp_path_factory, name):
    try:
        check_row_name("methods", name)
    except ConfigError:
        return
    folder = tmp_path_factory.mktemp("names")
    path = folder / f".{name}.safetensors.1234567"
    path.touch()
    assert path.parent == folder
    assert [found.name for found in folder.iterdir()] == [path.name]
