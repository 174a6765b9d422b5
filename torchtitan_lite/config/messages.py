"""What is wrong with a config: problems with their remedies."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config, with a remedy that needs no reading of code."""

    key: str  # as in TOML: "parallelism.tensor_parallel_degree"
    value: object  # as seen
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}: {self.why}. {self.remedy}."


class UserError(ValueError):
    """An error that the user can mend. Its text says how, so it is printed without a traceback."""


class ConfigError(UserError):
    """A config that cannot run. Holds every problem that was found, not only the first."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1)))
