"""Import what the ranks of most tests need. The server that forks the ranks loads this; it starts in the repository."""

import gc
import site

site.addsitedir("tests")
__import__("warm_start")
__import__("compare")

gc.freeze()  # so that the garbage collector of a rank skips everything imported here
