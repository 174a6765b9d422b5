"""Unicode's composed form (NFC) exactly as the `tokenizers` package has it.

Its tables are of about 2017: a mark that Unicode has taken up since then is to it a character like any other, which no
mark moves across and which joins nothing. Python's tables know those marks, so such characters cut the text, and the
parts between them are composed by themselves.

Python sorts the marks that follow a letter in a time that grows with their number squared: minutes for a text that has
nothing else. Where there are many, they are sorted here first.
"""

import re
import unicodedata
from itertools import groupby

# What has a combining class since then, and the blocks of five later scripts (Todhri, Tulu-Tigalari, Dives Akuru,
# Gurung Khema, Kirat Rai), whose letters compose. From the tables of Unicode 18.
LATER = re.compile(
    "[\u05c8-\u05c9\u07fd\u0897-\u089f\u08ca-\u08d3\u09fe\u0c3c\u0d3b-\u0d3c\u0eba\u1715\u1abf-\u1af0\u1df6-\u1dfa\ua82c"
    "\U000105c0-\U000105ff\U00010d24-\U00010d27\U00010d69-\U00010d6d\U00010eab-\U00010eac\U00010ecb-\U00010ecf"
    "\U00010ef0-\U00010efb\U00010efd-\U00010eff\U00010f46-\U00010f50\U00010f82-\U00010f85\U00011070\U0001133b"
    "\U00011380-\U000113ff\U0001145e\U00011839-\U0001183a\U00011900-\U0001195f\U000119e0\U00011a34\U00011a47\U00011a99"
    "\U00011d42-\U00011d45\U00011d97\U00011f41-\U00011f42\U00016100-\U0001613f\U00016d40-\U00016d7f"
    "\U00016ff0-\U00016ff1\U0001d127-\U0001d128\U0001d250-\U0001d281\U0001e08f\U0001e130-\U0001e136\U0001e2ae"
    "\U0001e2ec-\U0001e2ef\U0001e4ec-\U0001e4ef\U0001e5ee-\U0001e5ef\U0001e6e3-\U0001e6f5]+"
)

MANY_MARKS = re.compile(r"[^\w\s!-~]{100,}")  # a mark is neither a letter nor a space, and not ASCII


def compose(text: str) -> str:
    if not MANY_MARKS.search(text) and unicodedata.is_normalized("NFC", text):
        return text  # then it is in the older form too; most texts are, and this is quick
    parts, at = [], 0
    for later in LATER.finditer(text):
        parts += [compose_known(text[at : later.start()]), later.group()]
        at = later.end()
    return "".join(parts) + compose_known(text[at:])


def compose_known(text: str) -> str:
    """Compose a text without characters of LATER."""
    return unicodedata.normalize("NFC", MANY_MARKS.sub(sort_marks, text))


def sort_marks(found: re.Match[str]) -> str:
    """Take the characters apart and sort the marks between two others by class, as composing does first of all."""
    parts = "".join(unicodedata.normalize("NFD", character) for character in found.group())
    runs = groupby(parts, key=lambda part: unicodedata.combining(part) > 0)
    return "".join("".join(sorted(run, key=unicodedata.combining) if is_mark else run) for is_mark, run in runs)
