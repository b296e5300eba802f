"""One model at a time: what a node has loaded is gone before the next one loads its own."""

from __future__ import annotations

import gc

from kedro.framework.hooks import hook_impl


class MemoryHooks:
    """Frees what only refers to itself, which Python otherwise does at a moment of its choice."""

    @hook_impl
    def after_node_run(self) -> None:
        """An error that a library catches and keeps, such as that of a missing optional import, has the frames of its
        callers, and they have the model.

        What is left are the libraries, half a million objects: frozen, they are not looked through after each node.
        """
        gc.collect()
        gc.freeze()

    @hook_impl
    def after_pipeline_run(self) -> None:
        gc.unfreeze()

    @hook_impl
    def on_pipeline_error(self) -> None:
        gc.unfreeze()
