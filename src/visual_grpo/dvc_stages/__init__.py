"""``python -m visual_grpo.dvc_stages``: writes the DVC stages of an environment from its pipelines and parameters.

A stage per pipeline of the data flow. What it depends on and leaves is what the pipeline's datasets are in Kedro's
catalog; the source files follow from imports (`sources`), the parameters from what the pipeline reads
(`decisive_parameters`).
"""
