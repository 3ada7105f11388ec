"""Say what is wrong with labels that are no class indices, and which call makes class indices of them.

Labels may be a NumPy array or a tensor. Shapes: N rows, C classes.
"""

from __future__ import annotations

from typing import Any


def label_problem(labels: Any, n_rows: int) -> str | None:
    """Return what to say of labels that are not N class indices, such as "has shape [3, 1]. Use labels.squeeze(1)."

    Args:
        labels: An array or a tensor of numbers.
        n_rows: N.

    Returns:
        A verb phrase and a remedy; ``None`` if the labels are integers ``[N]``.
    """
    name, shape = str(labels.dtype).removeprefix("torch."), list(labels.shape)
    is_whole = name.startswith(("int", "uint"))
    if shape == [n_rows] and is_whole:
        return None
    what, call = f"has dtype {name}", "labels"
    if shape == [n_rows, 1]:
        what, call = f"has shape {shape}", "labels.squeeze(1)"
    elif len(shape) == 2 and shape[0] == n_rows and is_one_hot(labels):
        what, call, is_whole = f"has shape {shape} and is one-hot", f"{_as_integers('labels', labels)}.argmax(1)", True
    elif shape != [n_rows]:
        return f"has shape {shape}. Give [{n_rows}], one class index for each row of features."
    elif name.startswith("complex") or not bool((labels == labels // 1).all()):
        return f"{what}. Give integer class indices 0 .. C-1."
    if not is_whole:
        call = _as_integers(call, labels)
    return f"{what}. Give [{n_rows}], one class index for each row of features: {call}."


def _as_integers(call: str, labels: Any) -> str:
    return f"{call}.long()" if hasattr(labels, "long") else f"{call}.astype(int)"


def is_one_hot(labels: Any) -> bool:
    """Return whether every row of labels ``[N, C]``, an array or a tensor, has a single 1 and otherwise 0."""
    return bool(((labels != 0).sum(1) == 1).all()) and bool((labels.sum(1) == 1).all())
