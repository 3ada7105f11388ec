"""The Markdown form of a deletion record, for a person who must judge it."""

from __future__ import annotations

from sfu.names import counted
from sfu.records.record import Asked, Done, Estimated, FileDigests
from sfu.unlearning.result import REASONS

_MUCH_ROUNDED = 1e-3
_KINDS = {
    "random": "a random sample of the training rows",
    "class": "rows of one class",
    "person": "rows of one person",
    "selected": "rows that were selected",
}
_FILES = {
    "tensors": "head.safetensors", "settings": "head.json", "secret": "head.secret", "model": "checkpoint of the model",
}  # fmt: skip


def as_markdown(
    number: int, time: str, versions: str, files: tuple[FileDigests, FileDigests], asked: Asked, done: Done,
    estimated: Estimated, not_touched: list[str],
) -> str:  # fmt: skip
    """Return the text of a record, whose arguments are the parts of :class:`~sfu.records.record.DeletionRecord`."""
    before, after = done.n_train
    held = f" It had served {counted(done.earlier_requests, 'request')} without a record." * bool(done.earlier_requests)
    again = asked.rows - done.rows
    left_out = f" {counted(again, 'row')} had been forgotten before, or were given twice." if again else ""
    forced = " It was forced (--on-doubt apply)." if asked.on_doubt == "apply" else ""
    layer = "" if done.layer is None else f" of the layer `{done.layer}`"
    lines = [
        f"# Deletion record {number}",
        "",
        f"Made on {time} (UTC) by {versions}. `record-{number}.json` beside this page holds the same, for programs.",
        "",
        "## What was asked",
        "",
        f"To remove the influence of {counted(asked.rows, 'training row')} from a classifier head. The rows were "
        f"declared to be {_KINDS.get(asked.kind, asked.kind)}.{left_out}",
        "",
        "## What was done",
        "",
        f"The weights{layer} were changed by one step that was computed from the weights and the rows alone: "
        f"{done.method}. The head counted {before:,} training rows before, and counts {after:,} now.{held}{forced}",
        "",
        f"Verdict: **{done.verdict.replace('_', ' ')}**. {_sentence(done.note)}".rstrip(),
        *(f"- `{code}`: {REASONS.get(code, code)}" for code in done.reasons),
        "",
        "## What is certain",
        "",
        "The files before and after, by their SHA-256:",
        "",
        *_digests(*files),
        "",
        f"The record holds a keyed digest of each of the {counted(done.rows, 'row')}. Whoever has `head.secret` and a "
        "row can tell whether that row was forgotten. The digests alone tell nothing.",
        "",
        "## What is estimated",
        "",
        *_estimates(estimated, done.rounded),
        "",
        "This is no certificate: nothing here proves that the head is the one that retraining would give.",
        "",
        "## What was not touched",
        "",
        *(f"- {one}" for one in not_touched),
        "",
        "## How to check this record",
        "",
        f"`sfu-unlearn verify record-{number}.json`, with the records before it, says whether a record was altered or "
        "is missing.",
    ]
    return "\n".join(lines) + "\n"


def _sentence(note: str | None) -> str:
    return "" if not note else f"{note[0].upper()}{note[1:].rstrip('.')}."


def _digests(before: FileDigests, after: FileDigests) -> list[str]:
    lines = ["| file | before | after |", "|---|---|---|"]
    for key, name in _FILES.items():
        old, new = getattr(before, key), getattr(after, key)
        if old or new:
            lines.append(f"| {name} | {f'`{old}`' if old else '-'} | {f'`{new}`' if new else '-'} |")
    return lines


def _estimates(estimated: Estimated, rounded: float | None) -> list[str]:
    lines = []
    if estimated.share is None:
        lines.append("- How much of the rows' influence is gone cannot be predicted for this head.")
    else:
        low, high = estimated.share_interval or (estimated.share, estimated.share)
        lines.append(
            f"- {100 * estimated.share:.0f} % of the squared distance to a head that was retrained without the rows "
            f"is predicted to be gone ({100 * low:.0f} to {100 * high:.0f} %, nine times in ten). The distance that "
            f"is left is {estimated.distance:.2f} times the first."
        )
    l2, interval = estimated.l2, estimated.l2_interval
    if interval is None:
        lines.append(f"- l2 = {l2:.3g} was stated by the owner of the head.")
    else:
        lines.append(f"- l2 = {l2:.3g} was estimated from the rows ({interval[0]:.3g} to {interval[1]:.3g}).")
    if rounded is not None and rounded >= _MUCH_ROUNDED:
        lines.append(f"- Rounding to the checkpoint's dtype moved the weights by {100 * rounded:.1f} % of the change.")
    return lines
