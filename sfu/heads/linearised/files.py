"""Linearised heads on disk: parameters and settings of each head, and the network at w_c once for all of a folder.

``NAME.safetensors`` holds w (and its gradient, if there is any), ``NAME.json`` the settings,
``core-DIGEST.safetensors`` the whole network. Nothing is unpickled; the architecture is
looked up by name in torchvision.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfu.data.backbones.backbone import DTYPES
from sfu.errors import ArtifactError, SfuError
from sfu.files import write_tensors, write_text
from sfu.heads.linearised.core import Core
from sfu.heads.linearised.head import LinearisedHead
from sfu.heads.linearised.network import Source, rebuild_network
from sfu.losses import loss_from_json

SCHEMA, CORE_PREFIX = 1, "core-"


def save_head(head: LinearisedHead, stem: Path) -> list[Path]:
    """Write the head, and the core if the folder has it not yet.

    Raises:
        ArtifactError: A file cannot be written.
    """
    tensors, settings = stem.with_name(stem.name + ".safetensors"), stem.with_name(stem.name + ".json")
    arrays = {"parameters": head.parameters_CE}
    if bool(head.gradient_CE.any()):
        arrays["gradient"] = head.gradient_CE
    core = head.core
    about: dict[str, Any] = {
        "schema": SCHEMA, "kind": "linearised", "loss": head.loss.as_json(), "n_classes": head.n_classes,
        "n_features": head.n_features, "l2": head.l2, "n_train": head.n_train, "weight": head.weight,
        "n_parameters": core.n_parameters, "components": list(core.components),
        "core": {**core.source, "top_digest": core.digest},
    }  # fmt: skip
    written = [tensors, settings]
    if core.whole:
        place = stem.with_name(_core_name(core.source["digest"]))
        if not place.is_file():
            write_tensors(place, core.whole)
        written.append(place)
    write_tensors(tensors, arrays)
    write_text(settings, json.dumps(about, indent=2) + "\n")
    return written


def load_head(stem: Path, core: Core | None = None) -> LinearisedHead:
    """Read what :func:`save_head` wrote, with the core beside it, or with ``core`` if its weights are the same.

    Raises:
        ArtifactError: A file is missing, damaged, of another schema, or the core is not the one w belongs to.
    """
    from safetensors.torch import load_file

    tensors, settings = stem.with_name(stem.name + ".safetensors"), stem.with_name(stem.name + ".json")
    try:
        about = json.loads(settings.read_text(encoding="utf-8"))
        if (about["schema"], about["kind"]) != (SCHEMA, "linearised"):
            raise ArtifactError(
                f"{settings} is a {about['kind']} head of schema {about['schema']}; a linearised one of schema "
                f"{SCHEMA} is read here."
            )
        found = core or _load_core(stem, about["core"])
        if found.digest != about["core"]["top_digest"]:
            raise ArtifactError(
                f"the head at {stem} belongs to a core of digest {about['core']['top_digest'][:12]}, not "
                f"{found.digest[:12]}: other weights, or another architecture."
            )
        arrays = load_file(tensors)
        parameters_CE = arrays["parameters"]
        return LinearisedHead(
            parameters_CE, arrays.get("gradient", torch.zeros_like(parameters_CE)), float(about["l2"]),
            int(about["n_train"]), loss=loss_from_json(about["loss"]), weight=about["weight"], core=found,
        )  # fmt: skip
    except ArtifactError:
        raise
    except FileNotFoundError as error:
        raise ArtifactError(f"no head at {stem}: {error.filename or tensors} is missing.") from error
    except Exception as error:
        raise ArtifactError(f"the head at {stem} cannot be read ({type(error).__name__}: {error}).") from error


def _core_name(digest: str) -> str:
    return f"{CORE_PREFIX}{digest[:16]}.safetensors"


def _load_core(stem: Path, about: dict[str, Any]) -> Core:
    from safetensors.torch import load_file

    if "digest" not in about:
        raise ArtifactError(f"the head at {stem} has a core of your own; give it as `core`.")
    path = stem.with_name(_core_name(about["digest"]))
    if not path.is_file():
        raise ArtifactError(f"the core of the head at {stem} is missing: {path} belongs beside it.")
    weights: dict[str, Tensor] = load_file(path)
    source = Source(**{field.name: about[field.name] for field in fields(Source)})
    try:
        network = rebuild_network(source, weights, str(path))
    except SfuError as error:
        raise ArtifactError(f"{path}: {error}") from error
    if network.digest() != about["digest"]:
        raise ArtifactError(f"{path} is not the core its name says: its weights were changed or damaged.")
    example = torch.zeros(2, *about["shape"])
    core = Core.of(
        network.top, example, components=network.components, source=about, whole=network.state()
    )  # fmt: skip
    return core.to(torch.device("cpu"), DTYPES[source.dtype])
