"""Advice on errors of the machine, which needs the run's parameters."""

from __future__ import annotations

import json

from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol

from visual_grpo.command import Command
from visual_grpo.config import Parameters
from visual_grpo.faults import is_out_of_memory, phase_of, smaller


class FaultHooks:
    """Says which parameters would have needed less memory, and the command that sets them."""

    @hook_impl
    def on_node_error(self, error: Exception, catalog: CatalogProtocol) -> None:
        if not is_out_of_memory(error):
            return
        parameters: Parameters = catalog.load("parameters")
        phase = phase_of(error)
        tried = smaller(parameters, phase)
        where = f"In the phase {phase} of the training step. " if phase else ""
        if tried:
            shown = ", ".join(f"{name}={json.dumps(value)}" for name, value in tried.items())
            error.add_note(f"{where}Less memory: {shown}\nTry: {Command.now().adding(tried)}")
        error.add_note(
            "More that helps: model.dtype=bfloat16, smaller data.height and data.width, other programs closed"
            " (Troubleshooting, Out of memory)."
        )
