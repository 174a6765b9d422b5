"""The fork servers of the launcher and of `verify` import this. A fork server ends with the process that started it."""

from torchtitan_lite.faults.processes import end_with_parent

end_with_parent()
