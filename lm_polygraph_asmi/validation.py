"""Checks of arguments, and the normal form in which texts and ids are compared.

Error messages say what was expected and what was passed.

This module imports nothing heavy, so an invalid argument raises at once.
"""

import math
import re
import tempfile
import unicodedata
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path


def check_number(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a finite number. A string such as "1" is not a number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {value!r}")


def check_whole(name: str, value: object, least: int | None = None, why: str = "") -> None:
    """Raise ValueError unless `value` is a whole number, and at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if least is not None and int(value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}{why}")


def check_at_least_one(name: str, value: int | None) -> None:
    """Raise ValueError unless `value` is a whole number of at least 1, or None for the default."""
    if value is not None:
        check_whole(name, value, least=1)


def check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is in `known`."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that suggests the known name nearest to a wrong one; empty if none is near.

    Example:
        >>> did_you_mean("depht", ["depth", "seed"])
        ' (did you mean depth?)'
    """
    return "".join(f" (did you mean {near}?)" for near in get_close_matches(name, known, 1))


def listed(names: Iterable[object], most: int = 5, between: str = ", ") -> str:
    """A phrase that lists the first of several names.

    Example:
        >>> listed([1, 2, 3], most=2)
        '1, 2, ...'
    """
    shown = list(map(str, names))
    return between.join(shown[:most] + ["..."] * (len(shown) > most))


def describe_fields(content: object) -> str:
    """Describe a row without a prompt, to end an error message.

    Example:
        >>> describe_fields({"question": "Who?", "answer": None}), describe_fields(["Who?"])
        ('the fields question', 'a list')
    """
    if not isinstance(content, Mapping):
        kinds = {
            bool: "a boolean",
            int: "a number",
            float: "a number",
            str: "a text",
            type(None): "null",
        }
        return kinds.get(type(content), f"a {type(content).__name__}")
    names = [str(name) for name, value in content.items() if value is not None]
    return f"the fields {', '.join(names)}" if names else "no field"


def lone_surrogate(text: str) -> str | None:
    """Describe the first half of a surrogate pair in a text, which no tokenizer can read; or None.

    Example:
        >>> print(lone_surrogate("Who \\ud800?"))
        '\\ud800' at character 5, half of a surrogate pair
    """
    match = None if text.isascii() else re.search("[\ud800-\udfff]", text)
    return match and f"{match[0]!r} at character {match.start() + 1}, half of a surrogate pair"


def check_text(place: str, text: str) -> None:
    """Raise ValueError, beginning with `place`, if no tokenizer can read a text."""
    if half := lone_surrogate(text):
        raise ValueError(f"{place}expected text, got {half}: replace it")


def same_text(text: str) -> str:
    """The form in which texts are compared: NFC, with single spaces, and none at the ends.

    Characters without width, such as a soft hyphen or a byte order mark, are removed.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
        text = "".join(char for char in text if unicodedata.category(char) != "Cf")
    return " ".join(text.split())


def identity(value: object) -> str:
    """The text by which an id or cluster is compared. It is equal for 1, 1.0, "1" and " 1".

    Example:
        >>> identity(1.0), identity("1.0"), identity(" Doc\\xa01\\n")
        ('1', '1', 'Doc 1')
    """
    text = ""
    if isinstance(value, str):
        plain = unicodedata.normalize("NFKC", same_text(value))  # full-width digits are digits
        text = re.sub(r"^(-?\d+)\.0+$", r"\1", plain)
    elif isinstance(value, Integral) and not isinstance(value, bool):
        text = str(int(value))  # a float would round ids of 64 bits
    elif isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
        number = float(value)
        text = str(int(number)) if number.is_integer() else repr(number)
    if not text:
        raise ValueError(f"expected a text or a number, got {value!r:.80}")
    return text


def is_unspaced(character: str) -> bool:
    """Whether a character belongs to a script without spaces between words."""
    return unicodedata.name(character, "").startswith(
        ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
    )


def check_new(out: str | Path, then: str = "name another file, or remove it") -> None:
    """Raise ValueError if a file exists, since scores and calibrations never overwrite a file."""
    if Path(out).exists():
        raise ValueError(f"{out} exists: {then}")


def check_writable(out: str | Path, folder: bool = False) -> None:
    """Raise ValueError if an output cannot be written, before anything is computed for it.

    This is tried with a temporary file, since permissions do not show a read-only or full disk.

    Args:
        out: a file in an existing folder; or a folder, which need not exist.
        folder: whether `out` is a folder.
    """
    path = Path(out).absolute()
    try:
        home = path if folder else path.parent
        while folder and not home.exists():  # it is created when it is written to
            home = home.parent
        if not home.is_dir():
            problem = "is a file" if home.exists() else "does not exist"
            raise ValueError(f"cannot write {out}: its folder {problem} ({home})")
        if not folder and path.is_dir():
            raise ValueError(f"cannot write {out}: expected a file, got a folder")
        with tempfile.NamedTemporaryFile(dir=home, prefix=f"{path.name}."):
            pass
        if not folder and path.exists():
            path.open("ab").close()  # does not change the file
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"cannot write {out}: {reason}. Name another place") from error
