"""Files that a user could be given: bombs, lies in headers, pipes. Each maker returns its path."""

import io
import lzma
import os
import struct
import zipfile
import zlib

import numpy as np
from PIL import Image


def peak_memory(call):
    """The result of a call, and how much memory it took at its peak, in bytes."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    return call(), _status("VmHWM") - before


def _status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def content(name, text):
    """A file with this text or these bytes."""

    def make(folder):
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
        return folder / name

    return make


def sparse(name, size):
    """A file of this size that takes no space."""

    def make(folder):
        with open(folder / name, "wb") as file:
            file.truncate(size)
        return folder / name

    return make


def fifo(name):
    def make(folder):
        os.mkfifo(folder / name)
        return folder / name

    return make


def device(path):
    return lambda folder: path


def xz_bomb(name, gigabytes):
    """Many streams of zeros, one after the other."""
    stream = lzma.compress(bytes(10_000_000), preset=1)
    return content(name, stream * (gigabytes * 100))


def arrays(name="data.npz", **contents):
    def make(folder):
        np.savez(folder / name, **contents)
        return folder / name

    return make


def npy_bytes(shape, descr="'|u1'", data=b"", fortran="False"):
    """An .npy file with any header."""
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def members(**contents):
    """An .npz of members as they are; `claim` changes its directory before it is written."""
    claim = contents.pop("claim", lambda info: None)

    def make(folder):
        with zipfile.ZipFile(folder / "data.npz", "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in contents.items():
                file.writestr(f"{name}.npy", data)
            for info in file.filelist:
                claim(info)
        return folder / "data.npz"

    return make


def npy_array(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, complete=False):
    """A grey PNG; without its pixels unless `complete`."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packer = zlib.compressobj(1)
    rows = b"".join(packer.compress(bytes(width + 1)) for _ in range(height if complete else 1))
    body = chunk(b"IHDR", header) + chunk(b"IDAT", rows + packer.flush()) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def saved(format, size=(16, 16)):
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 100, 50)).save(buffer, format)
    return buffer.getvalue()


def jpeg(width, height):
    data = bytearray(saved("JPEG"))
    start = data.index(b"\xff\xc0") + 5
    data[start : start + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def gif(width, height):
    data = bytearray(saved("GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def bmp(width, height):
    data = bytearray(saved("BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def picture(name, data):
    """A folder with an image for each of five classes, and one file more."""

    def make(folder):
        for label in "01234":
            (folder / "pictures" / label).mkdir(parents=True)
            Image.new("RGB", (16, 16)).save(folder / "pictures" / label / "good.png")
        if callable(data):
            data(folder / "pictures" / name)
        else:
            (folder / "pictures" / name).write_bytes(data)
        return folder / "pictures"

    return make
