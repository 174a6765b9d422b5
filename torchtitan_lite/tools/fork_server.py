"""Imported by fork servers: of the launcher, and of `verify`. They end with the process that started them."""

from torchtitan_lite.faults.orphans import end_with_parent

end_with_parent()
