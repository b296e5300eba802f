"""Post-train visual models with Group Relative Policy Optimization, reproducibly.

The core without Kedro; every name of `__init__.pyi` is loaded when it is first used, so that importing the package
stays light.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
