"""Read saved heads of any registered kind: safetensors and JSON, so nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from sfu.errors import ArtifactError
from sfu.files import file_digest
from sfu.heads.base import Head, paths_of
from sfu.heads.cores.core import Core


def load_head(stem: str | Path, core: Core | None = None) -> Head:
    """Read the head that :meth:`sfu.heads.base.Head.save` wrote at ``stem``, of any kind and any earlier version.

    Args:
        stem: Path of the files without their suffixes. The noise of a certificate and the stored Hessian are read if
            ``stem.secret`` is there.
        core: Of a linearised head, the network at fixed weights, if it is in memory already or is your own. By default
            it is read from the file beside the head.

    Raises:
        ArtifactError: A file is missing, damaged or of an unknown kind or schema, the files disagree, or the core is
            not the one that the head belongs to.
    """
    stem = Path(stem)
    tensors, settings, secret = paths_of(stem)
    try:
        about = json.loads(settings.read_text(encoding="utf-8"))
        kind = Head.named(about["kind"], "kind")
        if about["schema"] not in kind.schemas:
            readable = ", ".join(map(str, kind.schemas))
            raise ArtifactError(
                f"{settings} has schema {about['schema']}, but this sfu reads schema {readable} of {about['kind']} "
                "heads. Use the sfu that wrote it."
            )
        # copies are aligned in memory as new tensors are, so products with them give the same bits
        arrays = {name: tensor.clone() for name, tensor in load_file(tensors).items()}
        if secret.is_file():
            arrays |= _read_secrets(secret, tensors)
        head = kind.restored(about, arrays, stem, core)
    except ArtifactError:
        raise
    except FileNotFoundError as error:
        raise ArtifactError(f"there is no head at {stem}: {error.filename or tensors} is missing.") from error
    except Exception as error:
        raise ArtifactError(f"the head at {stem} cannot be read ({type(error).__name__}: {error}).") from error
    if (head.n_classes, head.n_features) != (about["n_classes"], about["n_features"]):
        raise ArtifactError(f"{settings} and {tensors} do not belong together, because their shapes differ.")
    return head


def _read_secrets(path: Path, tensors: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        if (file.metadata() or {}).get("head") != file_digest(tensors):
            raise ArtifactError(
                f"{path} belongs to another head than {tensors}. Remove it, or put back the head that it was written "
                "with."
            )
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no mapping
