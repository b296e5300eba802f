"""Reads the rows of a Parquet table, decoded by another process with limited memory (see `table_decoder`)."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from visual_grpo.errors import UserError
from visual_grpo.records.layouts import table_decoder

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, "pa.Scalar"]
"""Column -> value."""


def read_rows(file: Path, columns: Sequence[str], memory: int) -> Iterator[Row]:
    """Yields the rows of a table; a few are in memory at a time.

    Args:
        memory: bytes that decoding may take.

    Raises:
        UserError: the table is damaged, or the memory does not suffice.
    """
    import pyarrow as pa

    done = 0
    # -P: files beside the script must not stand in for libraries.
    command = [sys.executable, "-P", table_decoder.__file__, str(file), str(memory), *columns]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        is_broken = False
        try:
            try:
                for batch in pa.ipc.open_stream(process.stdout):
                    for row in range(batch.num_rows):
                        yield {name: batch[name][row] for name in batch.schema.names}
                        done += 1
            except (pa.ArrowException, OSError):
                is_broken = True
            process.stdout.close()
            # A stream whose writer has failed may end as if all had been written.
            if process.wait() != 0 or is_broken:
                raise _error(process, file, done, memory)
        finally:
            process.kill()  # For a reader that has had enough; of no effect once it has ended.


def _error(process: subprocess.Popen[bytes], file: Path, done: int, memory: int) -> UserError:
    if process.returncode == table_decoder.TOO_LARGE:
        return UserError(
            f"{file}, after row {done}: decoding takes more than {memory / 1_000_000:g} MB of memory. Write the table"
            " again with smaller cells, or raise data.max_file_mb: decoding may take twice that."
        )
    assert process.stderr is not None
    said = process.stderr.read().decode("utf-8", "replace").strip()
    if process.returncode < 0:
        said = f"decoding it ended by {signal.Signals(-process.returncode).name}"
    return UserError(
        f"{file}, after row {done}: cannot be read as Parquet ({said.rpartition(chr(10))[2]}). Download the file again."
    )
