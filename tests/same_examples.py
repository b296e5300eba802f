"""hypothesis' settings: the same examples in every run, on machines of any speed; nothing is kept between runs.

Imported by every module of tests that uses hypothesis.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("same examples", derandomize=True, deadline=None, database=None, max_examples=100)
settings.load_profile("same examples")
