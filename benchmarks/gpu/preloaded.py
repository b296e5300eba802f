"""What all parts import, once for all of them.

peft imports bitsandbytes wherever it is installed, which starts CUDA, and a fork of a process with CUDA has none. So it
is hidden meanwhile; the parts that quantise import it themselves.
"""

import sys

sys.modules["bitsandbytes"] = None  # type: ignore[assignment]

import correct  # noqa: E402, F401
import facts  # noqa: E402, F401
import models  # noqa: E402, F401

del sys.modules["bitsandbytes"]
