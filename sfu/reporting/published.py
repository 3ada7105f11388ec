"""The paper's own figures, to be set beside a run's. "Towards Source-Free Machine Unlearning", CVPR 2025, per cent.

They are printed without seeds, spread or the settings of the comparison methods.
"""

from __future__ import annotations

COLUMNS = ("paper_test_accuracy", "paper_remain_accuracy", "paper_forget_accuracy", "paper_mia")
PUBLISHED: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "table_5": {  # CIFAR-10, linear head, 10 % forgotten
        "retrained": (72.0, 74.0, 72.0, 50.0),
        "neg_grad": (51.9, 53.2, 51.2, 48.0),
        "random_labels": (20.6, 21.6, 21.4, 47.0),
        "jit": (52.1, 53.1, 51.1, 49.1),
        "adversarial": (51.5, 52.7, 51.0, 50.0),
        "unlearned_minus_paper": (70.0, 71.0, 68.0, 51.4),
    },
}
"""Table -> row -> figures; the paper's own method is the row of its published settings."""


def published_row(table: str | None, row: str) -> dict[str, float]:
    """The paper's figures of a row, under :data:`COLUMNS`; empty if it has none."""
    figures = PUBLISHED[table].get(row) if table is not None else None
    return {} if figures is None else dict(zip(COLUMNS, figures, strict=True))
