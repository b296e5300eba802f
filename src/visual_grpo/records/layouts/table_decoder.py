"""Decodes a Parquet table in a separate process: ``python -P table_decoder.py FILE BYTES COLUMN...``

A few hundred bytes of Parquet can say billions of values, and only decoding shows it. So this process limits its own
memory, and a table that breaks the decoder breaks only this process. It writes batches of rows to stdout as an Arrow
stream. Run as a script, it imports nothing of the package, which may not be on its path.
"""

from __future__ import annotations

import sys

ROWS = 4
"""Rows of a batch: a mask of 840 x 840 pixels takes 5 MB while it is decoded."""

TOO_LARGE = 3
"""Exit code if the memory does not suffice."""
DAMAGED = 4

_READ_AHEAD = 1 << 20
"""Bytes of each column read from the file at a time."""

_OWN = 200_000_000
"""Bytes that Python and the libraries take themselves."""


def _limit_memory(most: int) -> None:
    """``most`` in bytes; without effect on Windows."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = most + _OWN
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _decode(file: str, columns: list[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_memory_pool(pa.system_memory_pool())  # The other pools reserve memory far beyond what they use.
    options = {"buffer_size": _READ_AHEAD, "pre_buffer": False, "page_checksum_verification": True}
    with pq.ParquetFile(file, **options) as table:
        batches = table.iter_batches(batch_size=ROWS, columns=columns, use_threads=False)
        first = next(batches, None)
        with pa.ipc.new_stream(sys.stdout.buffer, pa.schema([]) if first is None else first.schema) as stream:
            if first is not None:
                stream.write_batch(first)
            del first
            for batch in batches:
                stream.write_batch(batch)


def main(arguments: list[str]) -> int:
    """Returns the exit code; stderr says what was wrong."""
    import pyarrow as pa

    file, most, *columns = arguments
    _limit_memory(int(most))
    try:
        _decode(file, columns)
    except MemoryError:  # Also Arrow's own.
        return TOO_LARGE
    except (pa.ArrowException, OSError) as error:
        sys.stderr.write(str(error)[:500])
        return DAMAGED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
