"""Functions of Kedro nodes, one module for each pipeline; `pipeline_registry` wires them."""
