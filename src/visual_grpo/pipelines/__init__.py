"""The pipelines of `kedro run`: nodes that only wire, one package each."""
