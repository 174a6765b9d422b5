"""What the ranks of most tests import, for the server that forks them. It starts in the repository."""

import gc
import site

site.addsitedir("tests")
__import__("warm_start")
__import__("compare")

gc.freeze()  # the ranks need not look through what is imported here
