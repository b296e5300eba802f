"""Data preparation: reads records in common layouts, validates and splits them, and prepares their images.

A record passes from `sources` (which layout?) through a reader (`tabular`, `folders` or `coco`) as a `record.Record`,
then through `checks` and `preparation` (with `images`) into records.parquet, where `manifest.RecordTable` reads it as a
`PromptRecord`.
"""
