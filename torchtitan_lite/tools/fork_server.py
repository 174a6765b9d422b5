"""End a fork server when the process that started it ends. The fork servers of launcher and `verify` import this."""

from torchtitan_lite.faults.processes import end_with_parent

end_with_parent()
