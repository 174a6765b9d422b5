"""Imported by the fork server of the launcher, which must end with the launcher. Its ranks then end with it."""

from torchtitan_lite.faults.orphans import end_with_parent

end_with_parent()
