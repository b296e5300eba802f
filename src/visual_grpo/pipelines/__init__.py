"""Kedro's pipelines, a file each: its nodes, their inputs and outputs, and tags that say what a command needs.

| tag | meaning |
|---|---|
| ``tracked`` | the command has an MLflow run |
| ``apart`` | no other pipeline reads what it makes: it may run while a different command uses the same output folder |
| ``distributed`` | ``distributed.processes`` take part |
| ``model`` | before the first node, the model is there, or the starter can make it |
| ``training`` | as ``model``, and the settings of a training fit each other and the model |
| ``rewards`` | what the rewards need is there, and the records fit them |
| ``unscored`` | no reward is built except the one that paints answers: a training's other rewards are not taken over |
| ``parameters_of.NAME`` | the parameters come from the training whose adapters `Parameters.NAME` names |

conf/base/catalog.yml says which pipeline makes a dataset, what it is called at the end of a command, and which of its
files to look at first.
"""
