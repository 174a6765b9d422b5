"""Show what a user wrote or a file holds: short, on one line, without control characters."""

import json
import reprlib

MOST_OF_VALUE = 200  # characters of a value


class ShortRepr(reprlib.Repr):
    """`repr` in bounded time: long texts and lists lose their middle, deep ones their inside."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = MOST_OF_VALUE
        self.maxlist = self.maxtuple = self.maxdict = 20
        self.maxlevel = 4

    def repr_int(self, number: int, level: int) -> str:
        try:
            return super().repr_int(number, level)
        except ValueError:  # Python writes no more than some thousand digits
            return f"a number of {number.bit_length():,} bits"


def show_value(value: object) -> str:
    """Return a value as Python spells it, in at most MOST_OF_VALUE characters."""
    return show_text(ShortRepr().repr(value), MOST_OF_VALUE)


def show_text(text: str, most: int) -> str:
    """Return at most `most` characters of a text, with escapes for those that cannot be printed."""
    characters = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in shorten(text, most))
    return shorten("".join(characters), most)


def shorten(text: str, most: int) -> str:
    """Cut the middle out of a text that is too long."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def show_json(value: object) -> object:
    """Return the value itself if JSON can hold it in few characters, else the text that people are shown."""
    try:
        if len(json.dumps(value, allow_nan=False)) <= MOST_OF_VALUE:
            return value
    except (TypeError, ValueError, RecursionError):  # a date, a number that is not finite, or a nest of lists
        pass
    return show_value(value)
