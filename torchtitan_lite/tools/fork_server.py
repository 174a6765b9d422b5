"""End a fork server when the process that started it ends. The fork servers of the launcher and of `verify` import this
module."""

from torchtitan_lite.faults.processes import end_with_parent

end_with_parent()
