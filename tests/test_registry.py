"""Kinds and members: found by name, refused with the names there are, added by other packages."""

from __future__ import annotations

from importlib import metadata

import pytest

from sfu import registry
from sfu.errors import ConfigError
from sfu.experiment.keys import code_digest
from sfu.registry import Registered


class Animal(Registered, kind="animal"):
    """A kind."""


class Bird(Animal):
    """A shared base, not a member."""


class Owl(Bird, name="owl"):
    """A member."""


class Cat(Animal, name="cat"):
    """A member."""


class Stone(Registered, kind="stone"):
    """Another kind, whose names are its own."""


def test_members_are_found_by_name_and_kinds_do_not_mix():
    assert Animal.names() == ["cat", "owl"]
    assert Animal.named("owl") is Owl
    assert Owl.registered_name == "owl"
    assert Stone.names() == []


def test_unknown_names_are_refused_with_what_there_is():
    with pytest.raises(ConfigError, match=r"pet=owk is unknown\. Choose one of cat, owl\. Did you mean owl\?"):
        Animal.named("owk", "pet")


def test_two_classes_cannot_share_a_name():
    with pytest.raises(ConfigError, match="two classes register the animal 'cat'"):

        class Other(Animal, name="cat"):
            pass

    assert Animal.named("cat") is Cat


def test_a_plugin_of_another_package_is_loaded_and_a_broken_one_is_named(monkeypatch):
    class Guest(Registered, kind="guest"):  # of its own, so that no other test sees what is registered here
        pass

    class Broken:
        name, value = "broken", "nowhere.plugin"

        def load(self):
            raise ImportError("no module named nowhere")

    class Good:
        name, value = "good", "somewhere.plugin"

        def load(self):
            class Dog(Guest, name="dog"):
                pass

    monkeypatch.setattr(registry, "_groups", [registry.ENTRY_POINTS])
    monkeypatch.setattr(metadata, "entry_points", lambda group: [Good()])
    assert "dog" in Guest.names()
    monkeypatch.setattr(registry, "_groups", [registry.ENTRY_POINTS])
    monkeypatch.setattr(metadata, "entry_points", lambda group: [Broken()])
    for _ in range(2):  # the second look-up fails, too
        with pytest.raises(ConfigError, match=r"the plug-in 'broken' \(nowhere.plugin\) cannot be imported"):
            Guest.names()


def test_results_depend_on_the_code_of_plugins(tmp_path, monkeypatch):
    (tmp_path / "sfu_extra.py").write_text("x = 1\n")
    about = tmp_path / "sfu_extra-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sfu-extra\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[sfu.plugins]\nextra = sfu_extra\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert tmp_path / "sfu_extra.py" in registry.plugin_files()
    code_digest.cache_clear()
    before = code_digest()
    (tmp_path / "sfu_extra.py").write_text("x = 2\n")
    code_digest.cache_clear()
    after = code_digest()
    code_digest.cache_clear()
    assert before != after
