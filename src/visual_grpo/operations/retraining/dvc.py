"""``python -m dvc`` that also tells the retraining which started it why it fails, as the commands of its stages do."""

import logging
import sys

from dvc.cli import main

from visual_grpo.common.errors import chain
from visual_grpo.common.processes import tell_reason


class Telling(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        tell_reason(": ".join([record.getMessage(), *map(str, chain(error) if error else ())]).removeprefix(": "))


if __name__ == "__main__":
    logging.getLogger("dvc").addHandler(Telling(logging.ERROR))
    sys.exit(main(sys.argv[1:]))
