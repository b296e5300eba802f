"""``python -m visual_grpo.retraining.dvc_without_hints``: DVC as it is, but for its hints on what to do with git.

A retraining commits dvc.lock itself, or says that it is to be committed.
"""

from __future__ import annotations

import logging
import runpy

if __name__ == "__main__":
    # DVC's option --quiet would also hide which stage runs.
    logging.getLogger("dvc.repo.scm_context").setLevel(logging.WARNING)
    runpy.run_module("dvc", run_name="__main__", alter_sys=True)
