r"""What each stage of a run costs, by formula: products, bytes, decompositions and memory, from sizes alone.

The formulas are those of ``docs/scale.md``. They count the products and the passes over rows that the code makes, so
``torch.utils.flop_counter`` finds the same number of operations. Decompositions are counted as the products that take
as long. How many steps conjugate gradients and the fits take depends on the data; a usual number stands for it.

Shapes: N training rows, F to forget, R = N - F retained, T test rows, D features, E = D (+ 1 with bias), C classes, P
perturbations, K folds.
"""

from __future__ import annotations

from sfu.curvature.settings import PsdFitSettings
from sfu.curvature.shifts import SUBSET
from sfu.experiment.work import Held, Remedy, Sizes, Stage, Work
from sfu.losses.base import Layout
from sfu.losses.gram import panels
from sfu.losses.rows import CACHE_BYTES
from sfu.operators.plan import Plan, memory_estimate
from sfu.operators.structure import Structure

_FOLDS = 5
_EIGH, _EIGVALSH, _CHOLESKY, _QR = 13.0, 5.5, 1.1, 4.0  # products' operations in the same time, times E^3 (QR: D F^2)
_SCORE = 5.0  # of a fold on a grid of rho: products, times E^3
_SLOPES = 12  # times 8 bytes for each output and row: what values, slopes and curvature of a loss read and write
_LINEARIZED, _PRODUCTS = 9, 26  # passes of Newton-CG, from zero: values and gradients, and Hessian products
_CG = 25  # products of a solve to full precision, with the preconditioner
_FIT, _FIT_SECONDS = 2.5, 0.05  # of a fit of losses, times P^3, and of whatever size
_PAIR = 30  # bytes for each pair of losses in a fit
_DECOMPOSED = 1024  # largest E whose second moments are decomposed for the bound of a head
_DIRECTIONS = 16
_STEP_SECONDS = 0.15  # of a step of whatever size: draws, and many small calls
_CLASS_DRAWS, _CLASS_BYTES = 1e4, 300.0  # random sets whose classes are counted, and bytes for each class of them
_ATTACK = 0.03  # seconds of the membership attack on a head


def gram(count: int, width: int, *, convert: bool = True) -> Work:
    """Return the work of the second moments of some rows: a triangle of panels; rows are scaled, and converted once."""
    flops = 2.0 * count * sum((last - first) * (width - first) for first, last in panels(width))
    return Work(flops, 8.0 * count * width, count * width * (16.0 + 12.0 * convert))


def passes(count: int, width: int, classes: int, products: int, *, item: int = 8, convert: bool = False) -> Work:
    """Return the work of products of some rows with as many vectors as there are classes."""
    size = float(count * width)
    return Work(2.0 * products * size * classes, item * products * size, 12.0 * convert * size)


def slopes(count: int, classes: int, times: int = 1) -> Work:
    """Return the work on outputs: values, slopes and curvature of a loss."""
    return Work(moved=8.0 * _SLOPES * times * count * classes)


def _of_data(sizes: Sizes) -> tuple[Held, ...]:
    rows = sizes.rows + sizes.test
    return (Held(f"the features of {rows:,} rows", sizes.data_bytes, Remedy.rows),)


def _copied(sizes: Sizes, count: int) -> Held:
    return Held(f"a copy of {count:,} of these rows", float(count) * sizes.features * sizes.itemsize, Remedy.rows)


def _cached(count: int, width: int, item: int) -> Held:
    size = float(item) * count * width
    return Held(f"{count:,} rows in float{8 * item}", size if size <= CACHE_BYTES else 0.0)


def loading(sizes: Sizes) -> Stage:
    """Return the cost of reading, checking and converting the features, and of their fingerprint."""
    data = sizes.data_bytes
    return Stage("load", (Work(moved=6.0 * data),), (*_of_data(sizes), _copied(sizes, sizes.rows + sizes.test)))


def digests(sizes: Sizes) -> Work:
    """Return the work of a digest of every example."""
    return Work(moved=2.0 * sizes.data_bytes, fixed=5e-6 * (sizes.rows + sizes.test))


def training(name: str, sizes: Sizes, count: int, plan: Plan, layout: Layout) -> Stage:
    """Return the cost of exact training on ``count`` rows of a linear head whose Hessian is held by ``plan``."""
    width, classes = sizes.width, sizes.classes
    summary = passes(count, width, _DIRECTIONS, 1, convert=True)
    held = (*_of_data(sizes), *([_copied(sizes, count)] if count < sizes.rows else []), _cached(count, width, 8))
    if layout is Layout.shared and plan.structure is Structure.shared:
        work: tuple[Work, ...] = (
            gram(count, width), passes(count, width, classes, 4), slopes(count, classes), summary,
            Work(moved=16.0 * count * width),  # the rows' squares
            Work(solved=(_CHOLESKY + _EIGVALSH * (width <= _DECOMPOSED)) * width**3),
        )  # fmt: skip
        return Stage(name, work, (*held, Held(f"matrices of {width} x {width}", 8.0 * 5 * width**2)))
    seen = min(count, max(8192, 4 * width))
    work = (
        passes(count, width, classes, 2 * _LINEARIZED + 2 * _PRODUCTS, convert=True), summary,
        slopes(count, classes, _LINEARIZED + _PRODUCTS // 4),
        gram(seen, width), Work(solved=_EIGH * width**3),
    )  # fmt: skip
    hessians = Held(f"output Hessians of {count:,} rows for {classes} classes", 5 * 8.0 * count * classes, Remedy.rows)
    return Stage(name, work, (*held, _cached(count, width, 4), hessians, Held("second moments", 8.0 * 4 * width**2)))


def hessian(count: int, width: int, classes: int, structure: Structure) -> tuple[Work, ...]:
    """Return the work of forming a Hessian of some rows as blocks."""
    once = gram(count, width)
    if structure is Structure.shared:
        return (once,)
    each = (once, *(gram(count, width, convert=False) for _ in range(1, classes)))
    coupled = (gram(count, classes * width, convert=False),) if structure is Structure.dense else ()
    return (*each, passes(count, width, classes, 1), slopes(count, classes), *coupled)


def unlearned_plus(name: str, sizes: Sizes, plan: Plan) -> Stage:
    """Return the cost of a step with the retained rows' Hessian."""
    width, classes, count = sizes.width, sizes.classes, sizes.retain
    data = (*_of_data(sizes), _copied(sizes, count))
    if plan.structure is Structure.products:
        work: tuple[Work, ...] = (
            passes(count, width, classes, 2 * _CG, convert=True),
            slopes(count, classes, 1 + _CG // 4),
        )
        outputs = Held(f"outputs of {count:,} rows for {classes} classes", 2 * 8.0 * count * classes, Remedy.rows)
        return Stage(name, work, (*data, outputs))
    blocks, side = blocks_of(plan.structure, classes, width)
    work = (*hessian(count, width, classes, plan.structure), Work(solved=_CHOLESKY * blocks * side**3))
    held = Held("Hessians", memory_estimate(plan.structure, classes, width, count))
    step = (passes(sizes.forget, width, classes, 4, convert=True), slopes(sizes.forget, classes, 2))
    return Stage(name, (*work, *step, Work(moved=16.0 * count * width)), (*data, held))


def blocks_of(structure: Structure, classes: int, width: int) -> tuple[int, int]:
    """Return the number of blocks of an explicit Hessian and their side."""
    if structure is Structure.dense:
        return 1, classes * width
    return (classes if structure is Structure.blocks else 1), width


def reduced_width(sizes: Sizes) -> int | None:
    """Return the E that a request of few rows is reduced to (:mod:`sfu.curvature.span`); ``None`` if it is not."""
    left = sizes.forget + 2
    return left + int(sizes.bias) if left <= 0.75 * sizes.features else None


def folds(name: str, sizes: Sizes, plan: Plan, width: int) -> Stage:
    """Return the cost of a step with the forget rows' Hessian: Gram matrices of folds, decompositions and scores."""
    count, classes = sizes.forget, sizes.classes
    some = min(count, SUBSET)
    seen: tuple[Work, ...] = (
        passes(count, sizes.width, classes, 6, convert=True),
        Work(2.0 * count * (count // _FOLDS) * _DIRECTIONS, moved=40.0 * count * sizes.features),  # near-duplicates
        Work(2.0 * some**2 * (sizes.width + some) + 4.0 * some * width**2, fixed=_STEP_SECONDS),  # tests for a shift
        Work(moved=_CLASS_BYTES * min(_CLASS_DRAWS * classes, 1 << 25)),
    )
    if width < sizes.width:
        seen = (*seen, Work(solved=_QR * sizes.features * count**2))
    if plan.structure is Structure.products:
        work: tuple[Work, ...] = (
            passes(count, width, classes, 2 * _FOLDS * _CG, convert=True), slopes(count, classes, 2 * _CG),
            gram(min(count, max(8192, 4 * width)), width), Work(solved=_EIGH * width**3),
        )  # fmt: skip
        held: float = memory_estimate(plan.structure, classes, width, count, 3)
    else:
        blocks, side = blocks_of(plan.structure, classes, width)
        scored = Work(flops=_FOLDS * _SCORE * blocks * side**3, solved=(_FOLDS + 2) * _EIGH * blocks * side**3)
        work = (*hessian(count, width, classes, plan.structure), scored)
        held = memory_estimate(plan.structure, classes, width, count, 3 * _FOLDS)
    rows = Held(f"{count:,} rows to forget", 3 * 8.0 * count * sizes.width)
    return Stage(name, (*seen, *work), (rows, Held("Hessians of the folds", held)))


def fit_to_losses(name: str, sizes: Sizes, settings: PsdFitSettings, count: int, structure: Structure) -> Stage:
    """Return the cost of PSD fits to losses at ``count`` perturbed heads: one without each fold, and one of all."""
    width, classes, rows = sizes.width, sizes.classes, sizes.forget
    several = classes if structure is Structure.blocks else 1
    side = classes * width if structure is Structure.dense else width
    fitted = count * (classes if settings.per_class and structure is Structure.shared else 1)
    span = min(side, fitted)
    outputs = classes * count * several
    drawn = 16.0 * count * classes * width
    one = _EIGH * (span**3 + 2 * side**3) + (_QR * side * span**2 if span < side else 0.0)
    work = (
        passes(rows, width, outputs, 1), slopes(rows, outputs),
        *[Work(2.0 * fitted**2 * side, solved=_FIT * fitted**3 + one, fixed=_FIT_SECONDS)] * (several * (_FOLDS + 1)),
    )  # fmt: skip
    held = (
        Held(f"{rows:,} rows to forget", 3 * 8.0 * rows * width),
        Held(f"curvature.perturbations={count}", _PAIR * fitted**2 + drawn, Remedy.perturbations, count, drawn),
        Held("matrices of the fit", 8.0 * (8 + several) * side**2),
        Held("outputs at perturbed heads", 4 * 8.0 * min(1 << 22, rows * outputs)),
    )  # fmt: skip
    return Stage(name, work, held)


def evaluation(sizes: Sizes, n_heads: int) -> Stage:
    """Return the cost of scoring ``n_heads`` heads, in as few passes over the retained rows as they need."""
    width, classes, others = sizes.width, sizes.classes, sizes.forget + sizes.test
    at_once = max(1, min(16, 256 // classes))
    grouped = [min(at_once, n_heads - first) for first in range(0, n_heads, at_once)]
    work = (
        passes(sizes.retain, width, classes, 3, convert=True), slopes(sizes.retain, classes),
        *(passes(sizes.retain, width, classes * heads, 4) for heads in grouped),
        slopes(sizes.retain, classes, n_heads),
        *[passes(2 * others, width, classes, 1, convert=True)] * (n_heads + 1),
        slopes(others, classes, 2 * (n_heads + 1)),
        Work(fixed=_ATTACK * n_heads),
    )  # fmt: skip
    held = (
        *_of_data(sizes),
        _copied(sizes, sizes.retain),
        _cached(sizes.retain, width, 8),
        Held(f"output Hessians of {sizes.retain:,} rows", 2 * 8.0 * sizes.retain * classes, Remedy.rows),
        Held(f"outputs of {others:,} rows", 4 * 8.0 * others * classes, Remedy.rows),
    )
    return Stage("evaluate", work, held)


def shadows(sizes: Sizes, count: int, retrained: bool, steps: tuple[Stage, ...]) -> Stage:
    """Return the cost of ``count`` shadows under the quadratic loss, each unlearned by ``steps``."""
    width, classes = sizes.width, sizes.classes
    pool = sizes.rows + sizes.test
    one = (
        gram(min(sizes.forget, sizes.test) + sizes.forget // 2, width),
        Work(solved=(1 + retrained) * (_CHOLESKY + _EIGVALSH * (width <= _DECOMPOSED)) * width**3),
        passes(2 * sizes.forget, width, classes, 1 + len(steps), convert=True),
        *(piece for step in steps for piece in step.work),
    )
    work = (gram(2 * pool, width), *(piece for piece in one for _ in range(count)))
    held = Held(f"evaluation.shadows={count}", min(1 << 30, count * 64.0 * width**2))
    return Stage("attack", work, (*_of_data(sizes), _copied(sizes, pool), held))
