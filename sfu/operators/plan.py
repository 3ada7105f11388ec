"""Choose how a Hessian is held, by the memory it needs, before anything is computed.

Shapes: N rows, C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from sfu.errors import ConfigError
from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.operators.structure import Structure

DENSE_LIMIT = 2048
"""Largest C E for which coupled classes are held as one dense matrix."""
_RATE = 4e10  # operations a second
_CALL = 3e-3  # seconds for a vector, however small
_VECTORS, _FOLDS, _RHOS = 60, 5, 82
_GIB = 2**30
_ASSUMED_MEMORY = 8 * _GIB  # where Python cannot tell, as on Windows
_ALLOWED = {
    Layout.shared: (Structure.shared, Structure.products),
    Layout.blocks: (Structure.blocks, Structure.products),
    Layout.dense: (Structure.dense, Structure.blocks, Structure.products),
    Layout.products: (Structure.products,),
}


@dataclass(frozen=True)
class Plan:
    """How a Hessian will be held (never ``auto``), and why, in a few words for messages."""

    structure: Structure
    reason: str


def memory_estimate(structure: Structure, n_classes: int, width: int, count: int, copies: int = 3) -> int:
    """Return the bytes of ``copies`` Hessians in float64; for products, of the output Hessians and vectors."""
    if structure is Structure.products:
        return 8 * (2 * count * n_classes + 2 * 82 * n_classes * width)
    blocks = {Structure.shared: 1, Structure.blocks: n_classes, Structure.dense: n_classes**2}[structure]
    return 8 * copies * blocks * width**2


def available_memory(device: torch.device) -> int:
    """Return the memory of the device in bytes, used or not; 8 GiB for a machine whose memory Python cannot tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if not hasattr(os, "sysconf"):
        return _ASSUMED_MEMORY
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_structure(layout: Layout, wanted: Structure) -> None:
    """Refuse a structure that the loss does not have.

    Raises:
        ConfigError: The message names those it has.
    """
    allowed = (Structure.auto, *_ALLOWED[layout])
    if wanted not in allowed:
        names = ", ".join(structure.value for structure in allowed)
        raise ConfigError(f"curvature.structure={wanted.value} does not fit the loss. Choose one of {names}.")


def validation_seconds(structure: Structure, n_classes: int, width: int, count: int) -> float:
    """Estimate the seconds that cross-validation with ``count`` rows a fold takes one core, to compare structures.

    Explicit blocks are formed once, and decomposed and scored for each fold. Products are formed with a few dozen
    vectors, after one decomposition of the second moments.
    """
    count = _FOLDS * count
    moments = min(count, max(8192, 4 * width))
    if structure is Structure.products:
        vectors = 4.0 * count * n_classes * width
        return _VECTORS * (2 * vectors / _RATE + _CALL) + (2.0 * moments * width**2 + 12.0 * width**3) / _RATE
    blocks, side = {
        Structure.shared: (1, width), Structure.blocks: (n_classes, width), Structure.dense: (1, n_classes * width),
    }[structure]  # fmt: skip
    form = 2.0 * count * blocks * side**2
    rows = n_classes * width // (blocks * side)
    each = 4.0 * _RHOS * rows * side**2 if rows * _RHOS <= side else 4.0 * side**3
    score = _FOLDS * blocks * each
    return (form + score + 12.0 * (_FOLDS + 1) * blocks * side**3) / _RATE


def plan_structure(
    layout: Layout,
    n_classes: int,
    width: int,
    count: int,
    device: torch.device,
    wanted: Structure = Structure.auto,
    *,
    copies: int = 3,
    validated: bool = False,
) -> Plan:
    """Choose a structure for ``count`` rows, or check the one that was asked for.

    Explicit matrices may take half of the device's memory, a quarter where sfu chooses. ``copies`` of them are in use
    at one time, such as one for each fold. With ``validated``, the rows are a fold of a Hessian that is cross-validated
    as it is, and the quicker structure is chosen.

    Raises:
        ConfigError: The loss has no such structure, or it does not fit; the message names a cheaper one.
    """
    check_structure(layout, wanted)
    if layout is Layout.products:
        return Plan(Structure.products, f"{width} parameters shared by the classes: products")
    memory = available_memory(device)
    if wanted is not Structure.auto:
        need = memory_estimate(wanted, n_classes, width, count, copies)
        if need > memory / 2:
            cheap = memory_estimate(Structure.products, n_classes, width, count)
            raise ConfigError(
                f"curvature.structure={wanted.value} needs about {need / _GIB:.1f} GiB for {n_classes} classes of "
                f"{width} parameters, but this machine has {memory / _GIB:.1f} GiB. Set curvature.structure=products, "
                f"which needs {cheap / _GIB:.2f} GiB."
            )
        return Plan(wanted, f"curvature.structure={wanted.value}")
    first = _ALLOWED[layout][0]
    need = memory_estimate(first, n_classes, width, count, copies)
    total = n_classes * width
    if first is Structure.dense and total > DENSE_LIMIT:
        reason = f"C*E = {total} is above {DENSE_LIMIT}, so products take the place of a dense matrix"
    elif need > memory / 4:
        reason = (
            f"{first.value} would need {need / _GIB:.1f} GiB of {memory / _GIB:.1f} GiB, so products take its place"
        )
    elif validated and (quicker := _quicker(first, n_classes, width, count)) is not None:
        reason = quicker
    else:
        return Plan(first, f"C*E = {total}: {first.value}, {need / 2**20:.0f} MiB")
    return Plan(Structure.products, reason)


def _quicker(explicit: Structure, n_classes: int, width: int, count: int) -> str | None:
    """Return the reason why products would be quicker, or ``None``."""
    by_products, by_matrix = (
        validation_seconds(structure, n_classes, width, count) for structure in (Structure.products, explicit)
    )
    if by_products >= by_matrix:
        return None
    return f"products, estimated at {by_products:.2g} s, are quicker than {explicit.value} matrices ({by_matrix:.2g} s)"
