"""The Markdown form of a deletion record, for a person who must judge it."""

from __future__ import annotations

from sfu.names import counted
from sfu.records.layout import BEFORE
from sfu.records.record import Asked, Done, Estimated, Event, FileDigests, Purged
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
    number: int, time: str, versions: str, files: tuple[FileDigests, FileDigests], event: Event, layer: str | None,
    not_touched: list[str],
) -> str:  # fmt: skip
    """Return the text of a record, whose arguments are the parts of :class:`~sfu.records.record.DeletionRecord`."""
    what, certain, estimates = _of_event(event, layer)
    lines = [
        f"# Deletion record {number}",
        "",
        f"Made on {time} (UTC) by {versions}. `record-{number}.json` beside this page holds the same, for programs.",
        "",
        *what,
        "",
        "## What is certain",
        "",
        "The files before and after, by their SHA-256:",
        "",
        *_digests(*files),
        *certain,
        *estimates,
        "",
        "## What was not touched",
        "",
        *(f"- {one}" for one in not_touched or ["Everything else."]),
        "",
        "## How to check this record",
        "",
        f"`sfu-unlearn verify record-{number}.json`, with the records before it, says whether a record was altered or "
        "is missing.",
    ]
    return "\n".join(lines) + "\n"


def _of_event(event: Event, layer: str | None) -> tuple[list[str], list[str], list[str]]:
    """Return what happened, what is certain beyond the files, and what is estimated."""
    if event.purged is not None:
        return _of_purge(event.purged), [], []
    if event.asked is None or event.done is None or event.estimated is None:
        back = f"The step of record {event.undone} was taken back. The head and the model are those before it."
        return ["## What was done", "", back], [], []
    certain = (
        f"The record holds a keyed digest of each of the {counted(event.done.rows, 'row')}. Whoever has `head.secret` "
        "and a row can tell whether that row was forgotten. The digests alone tell nothing."
    )
    no_proof = "This is no certificate: nothing here proves that the head is the one that retraining would give."
    estimates = _estimates(event.estimated, event.done.rounded)
    told = ["", "## What is estimated", "", *estimates, "", no_proof]
    return _of_request(event.asked, event.done, layer), ["", certain], told


def _of_request(asked: Asked, done: Done, layer: str | None) -> list[str]:
    before, after = done.n_train
    held = f" It had served {counted(done.earlier_requests, 'request')} without a record." * bool(done.earlier_requests)
    again = asked.rows - done.rows
    left_out = f" {counted(again, 'row')} had been forgotten before, or were given twice." if again else ""
    files = f" They came in {asked.files:,} files, and were served as one request." if asked.files > 1 else ""
    forced = " It was forced (--on-doubt apply)." if asked.on_doubt == "apply" else ""
    kept = f" The head before is kept in the folder `{BEFORE}`, until the next request." if done.kept else ""
    of_layer = "" if layer is None else f" of the layer `{layer}`"
    return [
        "## What was asked",
        "",
        f"To remove the influence of {counted(asked.rows, 'training row')} from a classifier head. The rows were "
        f"declared to be {_KINDS.get(asked.kind, asked.kind)}.{files}{left_out}",
        "",
        "## What was done",
        "",
        f"The weights{of_layer} were changed by one step that was computed from the weights and the rows alone: "
        f"{done.method}. The head counted {before:,} training rows before, and counts {after:,} now.{held}{forced}"
        f"{kept}",
        "",
        f"Verdict: **{done.verdict.replace('_', ' ')}**. {_sentence(done.note)}".rstrip(),
        *(f"- `{code}`: {REASONS.get(code, code)}" for code in done.reasons),
    ]


def _of_purge(purged: Purged) -> list[str]:
    found = {f"the cache of {name}": removed for name, removed in purged.caches.items()}
    lines = ["| where | made of the rows | unknown |", "|---|---|---|"]
    for name, removed in (found | {"heads of run folders": purged.runs}).items():
        lines.append(f"| {name} | {removed.made_of_them:,} | {removed.unknown:,} |")
    further = [
        f"The head before the last request, kept in the folder `{BEFORE}`, was removed." if purged.kept_head else "",
        "The head lost its sums over forgotten rows (its ledger)." if purged.ledger else "",
    ]  # fmt: skip
    return [
        "## What was done",
        "",
        f"Files that were made of {counted(purged.rows, 'row')}, or that do not say of what they were made, were "
        "searched for and removed:",
        "",
        *lines,
        *(part for one in further if one for part in ("", one)),
    ]


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
