"""Packs a run's directory into pieces that can be moved one by one, and unpacks them."""

import gzip
import hashlib
import io
import json
import shutil
import tarfile

PIECE_BYTES = 14 << 20


class PieceWriter(io.RawIOBase):
    """Writes a stream as the files FOLDER/NAME.000, NAME.001, ..., each of `size` bytes but the
    last.
    """

    def __init__(self, folder, name, size):
        self.folder, self.name, self.size = folder, name, size
        self.count, self.data = 0, bytearray()

    def writable(self):
        return True

    def write(self, data):
        self.data += data
        while len(self.data) >= self.size:
            self._write_piece()
        return len(data)

    def _write_piece(self):
        (self.folder / f"{self.name}.{self.count:03}").write_bytes(self.data[: self.size])
        del self.data[: self.size]
        self.count += 1

    def close(self):
        if self.data:
            self._write_piece()
        super().close()


class PieceReader(io.RawIOBase):
    """Reads files one after the other, as one stream."""

    def __init__(self, paths):
        self.paths, self.data = list(paths), b""

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.data and self.paths:
            self.data = memoryview(self.paths.pop(0).read_bytes())
        count = min(len(buffer), len(self.data))
        buffer[:count], self.data = self.data[:count], self.data[count:]
        return count


def files_to_resume(folder):
    """Yields the files of a run or a study that --resume needs: no weights of what is finished."""
    for path in sorted(folder.rglob("*")):
        resumable = (path.parent / "last.safetensors").exists()
        finished = (path.parent / "result.json").exists() or not resumable
        if (
            path.is_file()
            and path.name != ".lock"
            and path.suffix != ".tmp"
            and not (path.suffix == ".safetensors" and finished)
        ):
            yield path


def pack(folder, pieces, name, size=PIECE_BYTES):
    """Packs a run into the directory `pieces`, whose old content is deleted.

    Returns {piece: its SHA-256}. Equal files give equal bytes.
    """
    shutil.rmtree(pieces, ignore_errors=True)
    pieces.mkdir(parents=True)

    def without_owner_and_time(info):
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with (
        PieceWriter(pieces, name, size) as raw,
        gzip.GzipFile("", "wb", 1, raw, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in files_to_resume(folder):
            tar.add(path, str(path.relative_to(folder)), filter=without_owner_and_time)
    return {path.name: digest(path) for path in sorted(pieces.iterdir())}


def digest(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(source, arriving, folder, name):
    """Copies the pieces in `source`, and unpacks them into `folder` once all have arrived.

    source: a directory with NAME.json and some pieces
    arriving: the directory where pieces wait for the others
    Returns the names of the missing pieces.
    Errors: ValueError if a piece differs from what was packed
    """
    checksums = json.loads((source / f"{name}.json").read_text())["pieces"]
    if not checksums:
        raise ValueError(f"{source / name}.json is of a finished run: there is nothing to resume")
    arriving.mkdir(parents=True, exist_ok=True)
    for piece, checksum in checksums.items():
        arrived = arriving / piece
        if (source / piece).exists() and (source / piece).resolve() != arrived.resolve():
            shutil.copyfile(source / piece, arrived)
        if arrived.exists() and digest(arrived) != checksum:
            arrived.unlink()
            if (source / piece).exists():
                raise ValueError(
                    f"{source / piece} is not the piece that {name}.json lists: copy it again"
                )
    missing = [piece for piece in checksums if not (arriving / piece).exists()]
    if not missing:
        incomplete = folder.with_name(folder.name + ".half")
        shutil.rmtree(incomplete, ignore_errors=True)
        with (
            io.BufferedReader(PieceReader(arriving / piece for piece in checksums)) as joined,
            gzip.GzipFile(fileobj=joined) as zipped,
            tarfile.open(fileobj=zipped, mode="r|") as tar,
        ):
            tar.extractall(incomplete, filter="data")
        incomplete.rename(folder)
        shutil.rmtree(arriving)
    return missing
