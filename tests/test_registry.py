"""Kinds and members: found by name, refused with the names there are, added by other packages."""

from __future__ import annotations

from importlib import metadata

import pytest

from sfu import registry
from sfu.errors import ConfigError
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
    with pytest.raises(TypeError, match="two classes register the animal 'cat'"):

        class Other(Animal, name="cat"):
            pass

    assert Animal.named("cat") is Cat


def test_a_plugin_of_another_package_is_loaded_and_a_broken_one_is_named(monkeypatch):
    class Broken:
        name, value = "broken", "nowhere.plugin"

        def load(self):
            raise ImportError("no module named nowhere")

    class Good:
        name, value = "good", "somewhere.plugin"

        def load(self):
            class Dog(Animal, name="dog"):
                pass

    monkeypatch.setattr(registry, "_groups", [registry.ENTRY_POINTS])
    monkeypatch.setattr(metadata, "entry_points", lambda group: [Good()])
    assert "dog" in Animal.names()
    monkeypatch.setattr(registry, "_groups", [registry.ENTRY_POINTS])
    monkeypatch.setattr(metadata, "entry_points", lambda group: [Broken()])
    with pytest.raises(ConfigError, match=r"the plug-in 'broken' \(nowhere.plugin\) cannot be imported"):
        Animal.names()
