"""Without a GPU, Triton's kernels run in its interpreter, for which they must be imported so."""

import os

os.environ["TRITON_INTERPRET"] = "1"
