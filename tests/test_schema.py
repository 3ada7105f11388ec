"""Settings check themselves: types, ranges, choices, unknown keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from sfu.errors import ConfigError
from sfu.schema import Settings, make, meta_of, setting


@dataclass
class Oven(Settings):
    prefix: ClassVar[str] = "oven"

    heat: float = setting(180.0, "Degrees.", above=0, below=300)
    minutes: int = setting(20, "Of baking.", at_least=1)
    fan: bool = setting(False, "Moves the air.", affects_results=False)
    shelf: str = setting("middle", "Where to put it.", choices=("top", "middle"))
    rest: float | None = setting(None, "Minutes to wait.", at_least=0, inherited=True)
    notes: list[str] = setting([], "Anything.")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"heat": 300.0}, r"oven\.heat=300\.0\. Give a finite number above 0 and below 300\."),
        ({"heat": float("nan")}, r"oven\.heat=nan\. Give a finite number"),
        ({"heat": True}, r"oven\.heat=True\. Give a finite number"),
        ({"minutes": 0}, r"oven\.minutes=0\. Give a whole number of at least 1\."),
        ({"minutes": 1.5}, r"oven\.minutes=1\.5\. Give a whole number"),
        ({"fan": "yes"}, r"oven\.fan=yes\. Choose true or false\."),
        ({"shelf": "midle"}, r"oven\.shelf=midle is unknown\. Choose one of middle, top\. Did you mean middle\?"),
        ({"rest": -1.0}, r"oven\.rest=-1\.0\. Give a finite number of at least 0\."),
        ({"rest": "long"}, r"oven\.rest=long\. Give a finite number of at least 0\."),
        ({"haet": 1}, r"oven\.haet is not a setting of the oven\. It takes heat, .* Did you mean oven\.heat\?"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given, message):
    with pytest.raises(ConfigError, match=message):
        make(Oven, given, "the oven")


def test_good_values_pass_and_containers_are_not_shared():
    one, other = make(Oven, {"heat": 200, "rest": 0.0}, "the oven"), Oven()
    one.notes.append("x")
    assert (one.heat, one.rest, other.notes) == (200, 0.0, [])
    metas = {name: meta_of(one) for name, one in Oven.__dataclass_fields__.items()}
    assert metas["rest"].inherited
    assert not metas["fan"].affects_results
    assert metas["heat"].help == "Degrees."
