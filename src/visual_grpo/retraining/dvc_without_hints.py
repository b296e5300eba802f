"""``python -m visual_grpo.retraining.dvc_without_hints``: DVC as it is, but for its hints on what to do with git.

A retraining commits dvc.lock itself, or says that it is to be committed.
"""

from __future__ import annotations

import logging
import sys

if __name__ == "__main__":
    from dvc.cli import main

    # DVC's option --quiet would also hide which stage runs.
    logging.getLogger("dvc.repo.scm_context").setLevel(logging.WARNING)
    sys.exit(main(sys.argv[1:]))
