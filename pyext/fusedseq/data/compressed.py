"""Opens data files, plain or compressed with gzip.

A small compressed file can expand to any size, up to a thousand times its own (a decompression
bomb). What is read from it is therefore limited: see EXPANSION.
"""

import gzip
import io
import zlib
from pathlib import Path
from typing import IO, Any, cast

# A compressed file may expand to RATIO times its size; a file of any size to at least FLOOR bytes.
# Text and vectors of real data sets expand to 2 to 10 times their compressed size.
RATIO, FLOOR = 100, 64 << 20


class TooLarge(ValueError):
    """A compressed file expands to more than its size allows."""


# What reading a damaged compressed file raises.
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, TooLarge)


def opened(path: Path) -> IO[bytes]:
    """A binary file, decompressed if its name ends in .gz.

    Reading raises one of DAMAGE where the compressed file is damaged, of which TooLarge where it
    expands to more than RATIO times its size and to more than FLOOR bytes.
    """
    if path.suffix != ".gz":
        return open(path, "rb")
    limit = max(RATIO * path.stat().st_size, FLOOR)
    return cast(IO[bytes], io.BufferedReader(_Limited(gzip.open(path, "rb"), limit), 1 << 16))


class _Limited(io.RawIOBase):
    """A stream that raises TooLarge once more than `limit` bytes were read from it."""

    def __init__(self, file: Any, limit: int) -> None:
        self.file, self.limit, self.left = file, limit, limit

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        n: int = self.file.readinto(into)
        self.left -= n
        if self.left < 0:
            raise TooLarge(
                f"it expands to more than {self.limit:,} bytes, over {RATIO} times its size"
            )
        return n

    def close(self) -> None:
        self.file.close()
        super().close()
