"""Imported by the fork servers of the launcher and `verify`, which then end with the process that started them."""

from torchtitan_lite.faults.processes import end_with_parent

end_with_parent()
