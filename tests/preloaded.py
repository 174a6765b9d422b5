"""Import what the ranks of most tests need. The server that forks the ranks starts in the repository, and loads this
module."""

import gc
import site

site.addsitedir("tests")
__import__("warm_start")
__import__("compare")

gc.freeze()  # the garbage collector of a rank then skips all objects that were imported here
