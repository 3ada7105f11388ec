"""Names that become names of files, and text that is shown with its control characters made visible."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterable

from sfu.errors import ConfigError

_LONGEST = 100  # bytes: leaves room for the endings that files add, up to the 255 of common file systems
_SEPARATORS = '/\\<>:"|?*'
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}
"""Names that Windows takes for devices, whatever follows the first dot."""
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
_JOINERS = "\u200c\u200d"  # Persian, Indic scripts and emoji need these two
_warned: set[tuple[str, str]] = set()
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str, keep: str = "") -> str:
    r"""Return text with control characters, line ends and changes of direction written out, such as ``\x1b``.

    A terminal would obey them: they clear the screen, hide a word, or show a file's name backwards.

    Args:
        text: Text that may hold names of files, classes or rows.
        keep: Characters to leave as they are, such as a line end in text of several lines.
    """
    if text.isprintable():
        return text
    return "".join(_written_out(character) if _is_hidden(character, keep) else character for character in text)


class VisibleFormatter(logging.Formatter):
    """Formats messages of the log with their control characters made visible."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), keep="\n")


def warn_once(source: str, message: str, about: str = "") -> None:
    """Log a warning under the name of a module, once in a process, however often the same files are read.

    Args:
        source: The module.
        message: One or two sentences.
        about: What it is about, if the message may differ the next time (a count, an example).
    """
    key = source, about or message
    if key not in _warned:
        _warned.add(key)
        logging.getLogger(source).warning("%s", message)


def show_warnings_safely() -> None:
    """Have warnings that reach the terminal without a handler of their own pass :class:`VisibleFormatter`."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())


def check_row_name(key: str, name: str, reserved: Iterable[str] = ()) -> None:
    """Refuse a row's name that cannot be the name of a file, with an ending added, on every common system.

    Args:
        key: How the message calls what has the name, such as ``methods``.
        name: The name.
        reserved: Names of other rows; upper and lower case count as the same.

    Raises:
        ConfigError: The message says what is wrong with the name.
    """
    wrong = _problem(name)
    taken = {file_name_key(other): other for other in reserved}
    if wrong is None and file_name_key(name) in taken:
        other = taken[file_name_key(name)]
        wrong = f"differs from the row {other!r} in upper and lower case only"
        wrong = "is that of another row" if other == name else wrong
    if wrong is not None:
        raise ConfigError(
            f"{key}: the name {visible(name)!r} {wrong}. It becomes the name of files in the run's folder. Choose "
            f"another name, of letters, digits, '-', '_' and '.', with at most {_LONGEST} bytes."
        )


def composed(text: str) -> str:
    """Return text with each accented letter as one character (NFC); macOS and its archives write it as two."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def forms_of(text: str) -> list[str]:
    """Return text as it is, and with its accented letters as one character each and as two."""
    return list(dict.fromkeys([text, *(unicodedata.normalize(form, text) for form in ("NFC", "NFD"))]))


def file_name_key(name: str) -> str:
    """Return what two names have in common if a file system may take them for the same."""
    return composed(composed(name).casefold())


def _problem(name: str) -> str | None:
    if not name or name != name.strip():
        return "is empty, or begins or ends with a space"
    if found := [character for character in _SEPARATORS if character in name]:
        return f"contains {found[0]!r}"
    if visible(name) != name:
        return "contains a control character"
    if name.startswith(".") or name.endswith("."):
        return "begins or ends with a dot"
    if name.partition(".")[0].rstrip().lower() in _DEVICES:
        return "is a device on Windows"
    if len(name.encode()) > _LONGEST:
        return f"has {len(name.encode())} bytes"
    return None


def _is_hidden(character: str, keep: str) -> bool:
    return unicodedata.category(character) in _HIDDEN and character not in _JOINERS and character not in keep


def _written_out(character: str) -> str:
    code = ord(character)
    long = f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return _NAMED.get(character) or (f"\\x{code:02x}" if code < 0x100 else long)


def counted(number: int, noun: str) -> str:
    """Return a number of things, such as ``1 row`` or ``1,200 rows``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
