"""Read saved heads of any registered kind: safetensors and JSON, so nothing is unpickled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from sfu.errors import ArtifactError, SfuError
from sfu.files import file_digest
from sfu.heads.base import Head, HeadRecord, paths_of
from sfu.heads.cores.core import Core
from sfu.heads.forgotten import Forgotten
from sfu.heads.kept import Kept
from sfu.heads.recipe import Recipe
from sfu.readers import TEXT_BYTES, Versioned, parse_record, read_bytes, read_tensors, refusing, require_regular

_REMEDY = "Save the head again, or take another copy of its files."


class _Kind(Versioned):
    kind: str


def load_head(stem: str | Path, core: Core | None = None) -> Head:
    """Read the head that :meth:`sfu.heads.base.Head.save` wrote at ``stem``, of any kind and any earlier version.

    Args:
        stem: Path of the files without their suffixes. The noise of a certificate, the stored Hessian, sketch and
            feature mean, and the digests of forgotten rows are read if ``stem.secret`` is there.
        core: Of a linearised head, the network at fixed weights, if it is in memory already or is your own. By default
            it is read from the file beside the head.

    Raises:
        ArtifactError: A file is missing, damaged or of an unknown kind or schema, the files disagree, or the core is
            not the one that the head belongs to.
    """
    stem = Path(stem).expanduser()
    tensors, settings, secret = paths_of(stem)
    for path in (settings, tensors):
        if not path.exists():
            raise ArtifactError(f"there is no head at {stem}: {path} is missing. Give the path without the suffix.")
    try:
        about, kind = _read_settings(settings)
        # copies are aligned in memory as new tensors are, so products with them give the same bits
        arrays = {name: tensor.clone() for name, tensor in read_tensors(tensors, _REMEDY).items()}
        if secret.exists():
            arrays |= _read_secrets(secret, tensors)
        with refusing(tensors, _REMEDY):
            head = kind.restored(about, arrays, stem, core)
            kept = Kept.restored(about.kept, arrays)
            shape, recipe = (*head.parameters_CE.shape,), Recipe.restored(about.recipe)
            forgotten = Forgotten.restored(about.forgotten, arrays, shape, head.n_train)
            head = replace(head, forgotten=forgotten, kept=kept, recipe=recipe)
    except ArtifactError:
        raise
    except SfuError as error:
        raise ArtifactError(f"the head at {stem} cannot be read ({str(error).rstrip('.')}). {_REMEDY}") from error
    if (head.n_classes, head.n_features) != (about.n_classes, about.n_features):
        raise ArtifactError(f"{settings} and {tensors} do not belong together, because their shapes differ. {_REMEDY}")
    return head


def _read_secrets(path: Path, tensors: Path) -> dict[str, Tensor]:
    with refusing(path, _REMEDY):
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("head") != file_digest(tensors):
                raise ArtifactError(
                    f"{path} belongs to another head than {tensors}. Remove it, or put back the head that it was "
                    "written with."
                )
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no mapping


def _read_settings(path: Path) -> tuple[HeadRecord, type[Head]]:
    with refusing(path, _REMEDY):
        text = read_bytes(path, TEXT_BYTES)
        known = parse_record(text, _Kind)
        kind = Head.named(known.kind, "kind")
        if known.version in kind.records:
            return parse_record(text, kind.records[known.version]), kind
    raise ArtifactError(
        f"{path} has schema {known.version}, but this sfu reads schema {', '.join(map(str, kind.records))} of "
        f"{known.kind} heads. Use the sfu that wrote it."
    )
