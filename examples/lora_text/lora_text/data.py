"""lora_text: sentences of the standard library's docstrings. The label is the package that a sentence comes from."""

import ast
import re
import sysconfig
import zlib
from pathlib import Path

import numpy as np

LENGTH, WORDS = 12, 1024  # tokens of a sentence, and ids that a token can have (0 is padding)
PRIVATE = ("asyncio", "email")  # the clients' records
PUBLIC = ("concurrent", "ctypes", "distutils", "http", "idlelib", "importlib", "json", "logging", "multiprocessing",
          "tkinter", "unittest", "urllib", "xml")  # fmt: skip


def sentences(package):
    """Return the sentences of a package's docstrings that have at least four words, each once and sorted."""
    found = set()
    for path in sorted((Path(sysconfig.get_paths()["stdlib"]) / package).rglob("*.py")):
        if "test" in path.parts or "tests" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for line in re.split(r"\.\s|\n\s*\n|\n\s*-", ast.get_docstring(node) or ""):
                    found.add(" ".join(re.findall(r"[a-z]+", line.lower())))
    return sorted(line for line in found if line.count(" ") >= 3)


def ids(line):
    """Return a sentence as ids from 1 up, the same on every machine, padded with 0."""
    words = [zlib.crc32(word.encode()) % (WORDS - 1) + 1 for word in line.split()[:LENGTH]]
    return words + [0] * (LENGTH - len(words))


def labelled(packages, most):
    """Return (x, y): at most so many sentences of each package, in an order that does not follow the alphabet."""
    rows = [(zlib.crc32(line.encode()), ids(line), c) for c, p in enumerate(packages) for line in sentences(p)]
    kept = dict.fromkeys(range(len(packages)), 0)
    x, y = [], []
    for _, row, c in sorted(rows):
        if kept[c] < most:
            kept[c] += 1
            x.append(row)
            y.append(c)
    return np.array(x, dtype=np.int64), np.array(y, dtype=np.int64)


def docstrings():
    """Return the clients' sentences, for `--dataset lora_text.data:docstrings`."""
    x, y = labelled(PRIVATE, most=800)
    return {"x": x, "y": y, "vocabulary": WORDS, "class_names": PRIVATE}
