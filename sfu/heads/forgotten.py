"""What a head remembers of what was forgotten from it: numbers of rows and requests, and no content of a row.

Shapes: F rows of a request, B of them, D features, C classes.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sfu.heads.ledger import Ledger
from sfu.names import counted
from sfu.readers import Count, Record, Size

if TYPE_CHECKING:
    from torch import Tensor

_BYTES = 16  # of a digest: no two of 10^15 rows share one by chance
_CHUNK = 1024  # rows in 64 bits at a time
_KEY, _DIGESTS = "forgotten_key", "forgotten_digests"


class ForgottenRecord(Record):
    """What a head's JSON file says of the requests that it has served."""

    requests: Count
    rows: Count
    ledger: bool = False
    removed: tuple[Size, Size, Size] | None = None


@dataclass(frozen=True)
class Forgotten:
    """The requests that a head has served since it was trained.

    With a key, it also recognises the rows: each is kept as a keyed digest (BLAKE2b) of its features and its label or
    targets. Whoever has the key *and* a row can tell whether that row was forgotten, so both are for the owner of the
    head alone, and are saved in its secret file. Without the key, the digests say nothing.

    Attributes:
        requests: Number of requests; every batch of a request that was served in batches is one.
        rows: Number of rows that they took out.
        key: Random bytes that the digests depend on; ``None`` if rows are only counted.
        digests: Digests of the rows.
        ledger: Their sums, if these are kept.
        removed: For how many of the rows the distance to Retrained is gone, as predicted: each counts for the predicted
            share of its request. Between the lower and the upper bound; ``None`` if that is not known of a request.
    """

    requests: int = 0
    rows: int = 0
    key: bytes | None = field(default=None, repr=False)
    digests: frozenset[bytes] = field(default=frozenset(), repr=False)
    ledger: Ledger | None = field(default=None, repr=False, compare=False)
    removed: tuple[float, float, float] | None = field(default=(0.0, 0.0, 0.0), compare=False)

    def keyed(self) -> Forgotten:
        """Return it with a key, a fresh one if there is none, so that it recognises the rows of later requests."""
        return self if self.key is not None else replace(self, key=secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE))

    def after(self, features_FD: Tensor, labels_F: Tensor) -> Forgotten:
        """Return it after a request for these rows, without what would lack them: the ledger and the prediction."""
        digests = self.digests.union(self._digests_of(features_FD, labels_F))
        return Forgotten(self.requests + 1, self.rows + labels_F.shape[0], self.key, digests, removed=None)

    def predicted(self) -> tuple[float, float, float] | None:
        """Return the predicted share of all requests so far, between its bounds; ``None`` if it is not known."""
        if self.removed is None or not self.rows:
            return None
        low, removed, high = (part / self.rows for part in self.removed)
        return low, removed, high

    def new_rows(self, features_FD: Tensor, labels_F: Tensor, *, copies: bool = True) -> Tensor:
        """Return the numbers of those rows that no earlier request took out, as far as it is known, ascending.

        Without ``copies``, only the first of equal rows is among them. Without a key, no row is recognised.
        """
        import torch

        if self.key is None:
            return torch.arange(labels_F.shape[0])
        seen, new = set(self.digests), []
        for number, digest in enumerate(self._digests_of(features_FD, labels_F)):
            if digest not in seen:
                new.append(number)
            if not copies:
                seen.add(digest)
        return torch.tensor(new, dtype=torch.int64)

    def _digests_of(self, features_FD: Tensor, labels_F: Tensor) -> list[bytes]:
        if self.key is None:
            return []
        found = []
        for features, labels in zip(features_FD.split(_CHUNK), labels_F.split(_CHUNK), strict=True):
            found += [
                hashlib.blake2b(row + label, digest_size=_BYTES, key=self.key).digest()
                for row, label in zip(_bytes_of(features), _bytes_of_labels(labels), strict=True)
            ]
        return found

    def __str__(self) -> str:
        """Say how many rows, in how many requests."""
        return f"{counted(self.rows, 'row')} in {counted(self.requests, 'request')}"

    def as_json(self) -> dict[str, Any]:
        """Return the numbers, for a JSON file."""
        return {
            "requests": self.requests, "rows": self.rows, "ledger": self.ledger is not None, "removed": self.removed,
        }  # fmt: skip

    def as_secrets(self) -> dict[str, Tensor]:
        """Return key and digests as tensors of bytes, if there are digests, and the ledger."""
        ledger = {} if self.ledger is None else self.ledger.as_secrets()
        if self.key is None or not self.digests:
            return ledger
        import torch

        rows = [list(digest) for digest in sorted(self.digests)]
        return ledger | {
            _KEY: torch.tensor(list(self.key), dtype=torch.uint8),
            _DIGESTS: torch.tensor(rows, dtype=torch.uint8),
        }

    @classmethod
    def restored(
        cls, about: ForgottenRecord | None, tensors: Mapping[str, Tensor], shape: tuple[int, int], n_train: int
    ) -> Forgotten:
        """Return what :meth:`as_json` and :meth:`as_secrets` wrote; a file of before there was any has no requests.

        Without its secret file, a head that has served a request has lost its ledger.

        Raises:
            ValueError: The bytes are of another shape or type, or the ledger does not fit parameters of that shape and
                the number of training rows.
        """
        counted = cls() if about is None else cls(about.requests, about.rows, removed=about.removed)
        if counted.removed is None and not counted.requests:
            counted = replace(counted, removed=(0.0, 0.0, 0.0))
        removed = (0.0, *(counted.removed or ()), float(counted.rows))
        if list(removed) != sorted(removed):
            raise ValueError(f"removed {list(removed[1:-1])} are no ascending numbers up to {counted.rows}")
        if about is not None and about.ledger:
            ledger = Ledger.restored(tensors, shape, n_train)
            counted = replace(counted, ledger=None if about.requests and ledger.start is None else ledger)
        if _KEY not in tensors:
            return counted
        key, digests = _bytes(tensors, _KEY, 1), _bytes(tensors, _DIGESTS, 2)
        if not 0 < len(key) <= hashlib.blake2b.MAX_KEY_SIZE or digests.shape[1] != _BYTES:
            raise ValueError(f"{_KEY} has {len(key)} bytes and {_DIGESTS} is {list(digests.shape)}")
        return replace(counted, key=key.tobytes(), digests=frozenset(row.tobytes() for row in digests))


def _bytes_of(rows: Tensor, kind: str = "<f8") -> list[bytes]:
    """Return the bytes of each row: the same for any number type, for -0.0 and on any machine."""
    numbers = rows.detach().cpu()
    if kind == "<f8":
        numbers = numbers.double() + 0.0
    return [row.tobytes() for row in numbers.numpy().astype(kind, copy=False)]


def _bytes_of_labels(labels_B: Tensor) -> list[bytes]:
    """Return the bytes of each class number or row of targets; one-hot targets have those of their class number.

    The single target of a head with one output is not one-hot: 0 and 1 are two labels.
    """
    if labels_B.ndim == 1:
        return _bytes_of(labels_B, "<i8")
    is_one_hot_B = ((labels_B == 0) | (labels_B == 1)).all(1) & (labels_B.sum(1) == 1) & (labels_B.shape[1] > 1)
    both = zip(_bytes_of(labels_B), _bytes_of(labels_B.argmax(1), "<i8"), is_one_hot_B.tolist(), strict=True)
    return [number if is_one_hot else targets for targets, number, is_one_hot in both]


def _bytes(tensors: Mapping[str, Tensor], name: str, n_axes: int) -> Any:
    import torch

    found = tensors.get(name)
    if found is None or found.dtype != torch.uint8 or found.ndim != n_axes:
        raise ValueError(f"{name} must be bytes with {n_axes} axes")
    return found.numpy()
