"""Draws command lines and config files that nobody would write, and judges what `check` makes of one.

Every key of config/schema.py is drawn, by its type, so that a new key needs no line here; so are the names that
torchtitan has for keys. Case n of a seed is always the same.
"""

import io
import json
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from unittest import mock

from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.reader import CONFIG_FOLDER, KEYS, format_toml
from torchtitan_lite.config.schema import Range
from torchtitan_lite.config.torchtitan_keys import ABSENT, ALIASES, SETTINGS_OF_ABSENT
from torchtitan_lite.tools import check

ALL_KEYS = sorted(name for name in {*KEYS, *ABSENT, *ALIASES, *SETTINGS_OF_ABSENT} if not name.endswith("*"))
MACHINES = (Machine("cpu", 1, 16 * 2**30, "a laptop"), Machine("cuda", 8, 80 * 2**30, "NVIDIA H100 80GB HBM3"))

NUMBERS = [
    *(0, 1, 2, 3, 7, 16, 64, 127, 128, 255, 1000, 4096, 65536, 10**6, 10**9, 10**18, 10**30, 10**400, 16**5000),
    *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64),
    *(0.0, -0.0, 1e-320, 1e-45, 1e-12, 1e-5, 0.1, 0.5, 0.999, 1.0, 1.5, 1e30, 1.8e308, float("inf"), float("nan")),
]
TEXTS = [
    *("", " ", ".", "..", "/", "~", "a", "A" * 256, "b" * 5000, "c/" * 3000, "x" * 300 + "/y", "../" * 2000),
    *("\0", "a\0b", "\x1b[2J\x1b[31m", "\x1b]0;title\x07", "\r", "\n" * 300, "\x7f", "\x9b", "\u202eabc", "\u2028"),
    *("é", "日本", "\U0001f642", "e\u0301" * 500, "%s%n{}", "{value}", "$HOME", "none", "true", "False", "auto"),
    *("-1", "0x10", "1e400", "-1e400", "nan", "inf", "1_000", "１２", "٣", "9" * 400, "9" * 5000, "1." + "0" * 9000),
    *(",", ";", "a,b;c,,", "a," * 500, "float8," * 2000, "[1]", "null", "--", "-", "-x", "=", "a=b", 'x"y', "'", "\\"),
    *("python_stdlib", "bytes", "debug", "model", "layers.0", "." * 3000, "a." * 2000, "\t", "AdamW", "2", "op"),
]
TOML_VALUES = [  # what the list above cannot spell
    *("1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "[]", "[[]]", "[[[]]]", "[1, 'a', true]", "{}", "{a = 1}"),
    *("[" * 60 + "]" * 60, "[" * 900 + "]" * 900, "{a=" * 60 + "1" + "}" * 60, "{a=" * 900 + "1" + "}" * 900),
    *("[" + "1," * 9000 + "]", "[" + "'a'," * 9000 + "]", "[" + "[]," * 9000 + "]", "{" + ".".join("a" * 3000) + "=1}"),
    *("''''''", "'''\n'''", "0xffff_ffff_ffff_ffff", "0b1", "0o7", "+1", "1e1000", "-nan", "truer", "", "=", "'", '"'),
    *("1" * 5000, "[nan]", "[inf, 1e999]", "[true]", "[-1, 1]", '["\\u0000"]', '["\\u001b[2J"]', f"'{'z' * 60000}'"),
]
ARGUMENTS = [
    *("--", "-", "", "=", "--=", "--=x", "--.", "--..", "--a", "--a.b", "--.a=1", "--model", "--model.", "-h1", "-c"),
    *("--no_", "--model.no_", "--model.no_dim", "--checkpoint.no_enable", "--checkpoint.no-enable=1", "--json=1"),
    *("--config", "--config=", "--config=.", "--config=/", "--config=..", "--config=debug", "--job.config_file"),
    *("--ranks", "--ranks=", "--ranks=0", "--ranks=-1", "--ranks=x", "--ranks=٣", "--ranks=" + "9" * 5000, "--launch"),
    *(
        "--gpus",
        "--gpus=0",
        "--gpus=8",
        "--gpus=" + "8" * 400,
        "--gpu=h100",
        "--gpu=\x1b[2J",
        "--hardware=hardware.toml",
    ),
    *("--hardware", "--hardware=", "--hardware=pipe/odd.toml", "--hardware=/dev/zero", "--hardware=deep/odd.toml"),
    *("--" + "a." * 30000, "--" + "k" * 100000, "--model." + "k" * 100000, "--a.\x1b[2J=1", "--model.\udcff=\udcfe"),
    *("--model.dim=" + "9" * 100000, "--job.description=" + "d" * 1000000, "\udcff", "--config=\udcff", "\x1b[2J"),
    *(
        "--config=" + "c" * 256,
        "--config=" + "c/" * 3000,
        "--config=\x1b[2J",
        "--config=a\0b",
        "--MODEL.DIM=1",
        "--é.ü=ö",
    ),
]


@dataclass(frozen=True)
class Case:
    args: list[str]
    machine: Machine
    n_ranks_per_host: str | None = None  # NGPU

    def __str__(self) -> str:
        return " ".join(repr(arg[:200]) for arg in self.args) + f" on {self.machine.name}, NGPU={self.n_ranks_per_host}"


# ---------------------------------------------------------------- files that are in the way


def make_odd_files(folder: Path) -> list[str]:
    """Pipes, devices, endless, damaged and empty files in the place of a config, a schedule, a model, a corpus."""
    names = ["odd.toml", "tok/tokenizer.json", "tik/tokenizer.model", "corpus/manifest.json", "step-1/manifest.json"]
    names += ["hf/config.json", "hf/model.safetensors", "flat.bin", "schedule.csv"]
    contents = {
        "empty": b"",
        "nul": b"\0" * 1000,
        "bytes": bytes(range(256)) * 9,
        "deep": b"[" * 100_000,
        "wide": b"0F0," * 100_000,
        "lines": b"0F0\n" * 100_000,
        "quoted": b'"' + b"x" * 200_000,
        "number": b"9" * 100_000 + b"F0",
        "escapes": b"\x1b[2J\x07,\r",
        "object": b"{}",
    }
    paths = []
    for kind in [*contents, "pipe", "sparse", "loop", "folder"]:
        for name in names:
            path = folder / kind / name
            path.parent.mkdir(parents=True, exist_ok=True)
            paths += [str(path.relative_to(folder)), str(path.parent.relative_to(folder))]
            if kind in contents:
                path.write_bytes(contents[kind])
            elif kind == "pipe":
                os.mkfifo(path)
            elif kind == "sparse":
                with open(path, "wb") as file:
                    file.truncate(2**34)
            elif kind == "loop":
                path.symlink_to(path)
            else:
                path.mkdir()
    others = {
        "gpipe.csv": "0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1\n",
        "stuck.csv": "0B0,0F0\n1F0,1B0\n",
        "far.csv": "0F0,0F99999999999\n1F0,1B0\n",
        "chain.csv": "".join(f"{stage}F0,{stage}B0\n" for stage in reversed(range(4000))),
        "hardware.toml": "[hardware]\nmemory_bytes = 1e308\nnode_size = 1e308\n",
    }
    for name, text in others.items():
        (folder / name).write_text(text)
    devices = ["/dev/zero", "/dev/null", "/dev/full", "/dev/random", "/proc/self/mem", "/proc/self/pagemap", "/proc"]
    return [*paths, *others, *devices]


# ---------------------------------------------------------------- cases


class Cases:
    """The cases of one seed, which change `bases`; their files are in `folder`, the working directory."""

    def __init__(self, seed: int, folder: Path, bases: list[Path]):
        self.draw = random.Random(seed)
        self.folder = folder
        self.bases = bases
        self.files = make_odd_files(folder)
        self.n = seed  # of the next case: the keys come one after the other

    def next_args(self) -> list[str]:
        """A base with values for one key, or for some."""
        self.n += 1
        kinds = [self.one_key_of_toml, self.one_key_of_command_line, self.several_keys]
        return self.draw.choices(kinds, weights=[8, 7, 3])[0]()

    def next(self) -> Case:
        draw = self.draw
        (kind,) = draw.choices([self.next_args, self.damaged_toml, self.odd_arguments], [18, 3, 1])
        args = kind()
        if draw.random() < 0.9:
            args = [*args, "--ranks", str(draw.choice([1, 1, 2, 4, 8]))]
        if draw.random() < 0.1:
            args.append("--json")
        odd_counts = ["2", "0", "x", "9" * 5000, "1" * 30, "\udcff"]
        return Case(args, draw.choice(MACHINES), draw.choice(odd_counts) if draw.random() < 0.03 else None)

    def next_key(self) -> str:
        return ALL_KEYS[self.n % len(ALL_KEYS)]

    def one_key_of_toml(self) -> list[str]:
        return self.write_toml([(self.next_key(), self.draw_toml_value(self.next_key()))])

    def one_key_of_command_line(self) -> list[str]:
        return [f"--config={self.draw.choice(self.bases)}", *self.spell_argument(self.next_key())]

    def several_keys(self) -> list[str]:
        keys = [self.next_key(), *self.draw.choices(ALL_KEYS, k=self.draw.randint(1, 4))]
        args = self.write_toml([(key, self.draw_toml_value(key)) for key in keys])
        return args + [arg for key in self.draw.sample(keys, 2) for arg in self.spell_argument(key)]

    def damaged_toml(self) -> list[str]:
        """A shipped config with some bytes changed, cut, doubled or moved."""
        draw = self.draw
        content = bytearray(draw.choice(sorted(CONFIG_FOLDER.glob("*.toml"))).read_bytes())
        for _ in range(draw.choice([1, 1, 2, 5, 30])):
            at, place = draw.randrange(len(content)), draw.randrange(len(content))
            until = at + draw.choice([1, 1, 2, 10, 100])
            piece = bytes(content[at:until])
            change = draw.choice(["byte", "cut", "double", "move", "insert"])
            if change == "byte":
                content[at] = draw.randrange(256)
            if change == "insert":
                content[at:at] = draw.choice("= [ ] ' \" \n \0 \x1b # 9 . {".split(" ")).encode()
            if change in ("cut", "move"):
                del content[at:until]
            if change in ("double", "move"):
                content[place:place] = piece
            content = content or bytearray(b"x")
        return self.write_file(bytes(content))

    def odd_arguments(self) -> list[str]:
        draw = self.draw
        n = draw.choice([1, 2, 3, 10])
        args = [draw.choice([*ARGUMENTS, *TEXTS]) for _ in range(n)]
        return args if draw.random() < 0.9 else [draw.choice([arg for arg in ARGUMENTS if len(arg) < 20])] * 20_000

    # ------------------------------------------------------------ values

    def draw_value(self, key: str) -> Any:
        """A value for a key: fitting its type, at the edge of it, or of another type."""
        draw = self.draw
        if key in KEYS and draw.random() < 0.5:
            return self.draw_fitting(KEYS[key])
        return draw.choice([self.draw_number(), draw.choice(TEXTS), draw.choice(self.files)])

    def draw_number(self) -> int | float:
        return self.draw.choice(NUMBERS) * self.draw.choice([1, 1, 1, -1])

    def draw_fitting(self, annotation: Any) -> Any:
        draw, arguments = self.draw, get_args(annotation)
        origin = get_origin(annotation)
        if origin is Literal:
            return draw.choice(arguments)
        if origin is Annotated:
            allowed = next((extra for extra in arguments[1:] if isinstance(extra, Range)), None)
            if allowed is None:
                return self.draw_fitting(arguments[0])
            edges = [edge for edge in (allowed.low, allowed.high, allowed.auto) if edge is not None]
            edges += [edge + step for edge in edges for step in (-1, 1)]
            number = draw.choice([*edges, self.draw_number()])
            return number if arguments[0] is float or number != number or number in (1e400, -1e400) else int(number)
        if origin is list:
            return [self.draw_fitting(arguments[0]) for _ in range(draw.choice([0, 1, 1, 2, 3]))]
        if type(None) in arguments:
            return self.draw_fitting(next(argument for argument in arguments if argument is not type(None)))
        if annotation is bool:
            return draw.random() < 0.7
        if annotation is str:
            return draw.choice([*TEXTS, *self.files])
        return self.draw_number()

    def draw_toml_value(self, key: str) -> str:
        """A value as TOML has it; some are none."""
        if self.draw.random() < 0.15:
            return self.draw.choice(TOML_VALUES)
        return spell_toml(self.draw_value(key))

    def spell_argument(self, key: str) -> list[str]:
        value = self.draw_value(key)
        items = value if isinstance(value, list) else [value]
        text = ",".join(item if isinstance(item, str) else spell_toml(item) for item in items)
        name = f"--{key}" if self.draw.random() < 0.8 else f"--{key}".replace("_", "-")
        return [f"{name}={text}"] if self.draw.random() < 0.5 else [name, text]

    # ------------------------------------------------------------ files

    def write_toml(self, lines: list[tuple[str, str]]) -> list[str]:
        """A base with these keys in place of its own."""
        names = {key.rpartition(".")[2] for key, _ in lines}
        kept = self.draw.choice(self.bases).read_text().splitlines()
        kept = [line for line in kept if line.partition(" ")[0] not in names]
        sections = {line for line in kept if line.startswith("[")}
        text = "\n".join(kept) + "\n"
        for key, value in lines:
            section, _, name = key.rpartition(".")
            if f"[{section}]" in sections:
                text = text.replace(f"[{section}]\n", f"[{section}]\n{name} = {value}\n", 1)
            else:
                text += f"[{section}]\n{name} = {value}\n"
                sections.add(f"[{section}]")
        return self.write_file(text.encode("utf-8", "surrogateescape"))

    def write_file(self, content: bytes) -> list[str]:
        (self.folder / "case.toml").write_bytes(content)
        return ["--config", "case.toml"]


def spell_toml(value: Any) -> str:
    """A TOML literal, but for what TOML has no word for."""
    if isinstance(value, list):
        return f"[{', '.join(map(spell_toml, value))}]"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**1000:
        return f"{value:#x}"
    return repr(value) if isinstance(value, float) else format_toml(value)  # inf and nan are TOML's words too


# ---------------------------------------------------------------- what `check` must never do

MOST_CPU_S = 1.0  # of one check
MOST_REAL_S = 120  # then a check that does not end is stopped: it loops, or waits for a pipe
MOST_LINES, MOST_CHARACTERS = 60, 8_000  # a screen of text
MOST_JSON_CHARACTERS = 500_000  # a sound layout lists every module


class Stopped(BaseException):
    """Raised in a check that takes too long."""


def stop(signum: int, frame: object) -> None:
    raise Stopped


@contextmanager
def memory_limited(gib: int) -> Iterator[None]:
    """This process may take so much more memory than it has: who wants more gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + gib * 2**30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def judge(case: Case) -> tuple[bool, list[str]]:
    """Run `check` in this process, on the case's machine. Returns whether it accepts the case, and its faults."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")  # as Python opens them
    environment = {name: value for name, value in os.environ.items() if name not in ("NGPU", "NNODES")}
    environment |= {"NGPU": case.n_ranks_per_host} if case.n_ranks_per_host is not None else {}
    faults: list[str] = []
    status: object = None
    handler = signal.signal(signal.SIGALRM, stop)
    started = time.process_time()
    with (
        mock.patch.object(check, "detect_machine", lambda: case.machine),
        mock.patch.dict(os.environ, environment, clear=True),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            signal.alarm(MOST_REAL_S)
            status = check.main(case.args)
        except SystemExit as error:  # argparse's own
            status = error.code
        except (Exception, Stopped) as error:
            faults.append(f"{type(error).__name__}: {str(error)[:200]}")
        finally:
            signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    cpu_s = time.process_time() - started
    if cpu_s > MOST_CPU_S:
        faults.append(f"{cpu_s:.1f} s of CPU time")
    if not faults and status not in (0, 2):
        faults.append(f"exit status {status!r}")
    printed = []
    for stream in (out, err):
        stream.flush()
        printed.append(stream.buffer.getvalue().decode())
    faults += find_ugly(*printed, as_json="--json" in case.args)
    return status == 0, faults


def find_ugly(out: str, err: str, *, as_json: bool) -> list[str]:
    """What a terminal should not be sent, and JSON that is none."""
    faults = []
    if control := {character for character in out + err if not (character.isprintable() or character == "\n")}:
        faults.append(f"control characters {sorted(control)}")
    shown = err if as_json else out + err
    if len(shown) > MOST_CHARACTERS or shown.count("\n") > MOST_LINES or len(out) > MOST_JSON_CHARACTERS:
        faults.append(f"{len(shown)} characters in {shown.count(chr(10))} lines, {len(out)} to standard output")
    if as_json and out.startswith("{"):
        try:
            json.loads(out, parse_constant=float.fromhex)  # NaN is no JSON
        except ValueError as error:
            faults.append(f"its JSON is none: {error}")
    return faults
