"""One module or package for each built-in family; `model.family` finds it by its name, and its `FAMILY`."""
