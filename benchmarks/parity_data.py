"""Makes the text of gpu_parity.py: source and documentation of packages, each document once.

    python benchmarks/parity_data.py --out FOLDER [--seed 1]

    download   wheels by `pip download`, Debian's sources by `apt-get source`; FOLDER/downloads
    documents  files that are text, of each package at most MOST_OF_PACKAGE bytes
    repeated   a document is left out whose shingles were mostly in earlier ones; documents of
               VALIDATION come first, so nothing of the validation text is trained on
    shuffled   by the hash of seed, package and name, then cut to TRAIN_BYTES and VALIDATION_BYTES
    tokenizer  byte-level byte-pair encoding of the first TOKENIZER_BYTES of training text
    written    FOLDER/text: _parity_tokens.py says which files

Versions are pinned, all licences are permissive, and the same versions give the same bytes, whose
hash is printed. Needs a machine with pip, apt-get and Debian's keyring, as any user.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import _gpu_timing as timing  # first: it makes minifloat importable
from _parity_text import Document, documents_of, order_of, without_repeated
from _parity_tokens import write_text_parts

PYPI = """accelerate==1.15.0 apache-beam==2.77.0 astropy==8.0.2 biopython==1.88 bokeh==3.10.2
    botorch==0.18.1 celery==5.7.0 cinder==29.0.0 cirq-core==1.7.0 cython==3.3.1 dask==2026.8.0
    diffusers==0.42.1 distributed==2026.8.0 django==6.1.3 docutils==0.23 fastapi==0.165.0
    flask==3.1.3 flax==0.12.12 gradio==6.31.0 great-expectations==1.24.1 homeassistant==2025.1.4
    ibis-framework==12.0.0 ipython==9.18.1 jax==0.12.0.1 jedi==0.20.1 keras==3.15.1
    langchain-community==0.4.2 llama-index-core==0.14.25 matplotlib==3.11.2 megatron-core==0.19.2
    mlflow==3.18.0 monai==1.6.1 moto==5.2.5 mypy==2.4.1 nemo-toolkit==3.0.0 networkx==3.7
    neutron==29.0.0 nltk==3.10.4 nova==34.0.0 numba==0.68.1 numpy==2.5.5 onnx==1.23.2
    openai==3.54.0 pandas==3.1.1 peft==0.21.2 pennylane==0.45.1 pygments==2.21.0
    pymatgen==2026.10.24 pymc==6.4.0 pyro-ppl==1.9.2 pyscf==2.14.0 pytest==9.2.0 qiskit==2.6.2
    ray==2.60.0 rich==15.0.0 scikit-image==0.26.0 scikit-learn==1.9.1 scipy==1.18.1
    sentry-sdk==2.75.0 setuptools==84.2.1 sglang==0.5.23 spacy==3.8.18 sphinx==9.1.1
    sqlalchemy==2.1.9 sqlglot==30.30.0 statsmodels==0.15.0 streamlit==1.67.0 sympy==1.14.0
    tensorflow-probability==0.25.0 textual==8.2.8 timm==1.0.31 torch-geometric==2.8.1
    torchvision==0.29.2 tornado==6.6.1 transformers==5.23.0 trl==1.16.0 twisted==26.10.0
    wagtail==8.0.1 werkzeug==3.1.9 xarray==2026.9.0 yt==4.4.3 zope.interface==8.7"""
DEBIAN = """boost1.74=1.74.0+ds1-21 curl=7.88.1-10+deb12u15 dpdk=22.11.11-0+deb12u1
    erlang=1:25.2.3+dfsg-1+deb12u4 ghc=9.0.2-4 golang-1.19=1.19.8-2 grpc=1.51.1-3
    guava-libraries=31.1-1 mesa=22.3.6-1+deb12u2 nodejs=18.20.4+dfsg-1~deb12u2
    openssl=3.0.20-1~deb12u2 php8.2=8.2.32-1~deb12u1 postgresql-15=15.18-0+deb12u1
    python3.11=3.11.2-6+deb12u8 rocksdb=7.8.3-2 ruby3.1=3.1.2-7+deb12u1 rustc=1.63.0+dfsg1-2
    sqlite3=3.40.1-2+deb12u2 vtk9=9.1.0+really9.1.0+dfsg2-5+deb12u1"""
VALIDATION = {
    "celery",
    "curl",
    "dask",
    "guava-libraries",
    "networkx",
    "pyro-ppl",
    "rocksdb",
    "wagtail",
}
SUITE = "deb-src [signed-by={keyring}] http://deb.debian.org/debian bookworm main\n"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
GLIBC = (39, 38, 36, 35, 34, 32, 31, 28, 27, 24, 17, 12, 5)  # of wheels' manylinux tags
TRAIN_BYTES, VALIDATION_BYTES = 440_000_000, 20_000_000


def download_wheel(pin: str, folder: Path) -> None:
    """Downloads a package's wheel for CPython 3.12 on x86-64, without its dependencies."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC]
    tags += [f"manylinux{year}_x86_64" for year in (2014, 2010, 1)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    command += [option for abi in ("cp312", "abi3", "none") for option in ("--abi", abi)]
    command += [option for tag in tags for option in ("--platform", tag)]
    subprocess.run([*command, "-d", str(folder), pin], check=True)


def apt_options(root: Path) -> list[str]:
    """Returns the options with which apt-get keeps its lists in `root`, and fetches them once."""
    sources = root / "sources.list"
    options = [f"Dir::Etc::sourcelist={sources}", "Dir::Etc::sourceparts=/dev/null"]
    options += [f"Dir::State::Lists={root / 'lists'}", f"Dir::Cache={root / 'cache'}"]
    flags = [flag for option in options for flag in ("-o", option)]
    if not list((root / "lists").glob("*Sources*")):
        for folder in ("lists/partial", "cache/archives/partial"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        sources.write_text(SUITE.format(keyring=KEYRING))
        subprocess.run(["apt-get", *flags, "-q", "update"], check=True)
    return flags


def download(out: Path) -> dict[str, list[Path]]:
    """Downloads what is not there yet; returns each package's archives."""
    found = {}
    for pin in PYPI.split():
        name = pin.partition("==")[0]
        folder = out / name
        if not list(folder.glob("*.whl")):
            download_wheel(pin, folder)
        found[name] = sorted(folder.glob("*.whl"))
    for pin in DEBIAN.split():
        name = pin.partition("=")[0]
        folder = out / name
        if not list(folder.glob("*.dsc")):
            folder.mkdir(parents=True, exist_ok=True)
            command = ["apt-get", *apt_options(out / "apt"), "-q", "source", "--download-only", pin]
            subprocess.run(command, cwd=folder, check=True)
        archives = folder.glob("*.orig*.tar.*")
        found[name] = sorted(path for path in archives if path.suffix != ".asc")
    return found


def read_packages(packages: dict[str, list[Path]], seed: int) -> dict[str, list[Document]]:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        names = sorted(packages)
        read = pool.map(partial(documents_of, seed=seed), [packages[name] for name in names])
        return dict(zip(names, read, strict=True))


def cut(documents: list[Document], size: int) -> Iterator[bytes]:
    """Yields the first documents of together at most `size` bytes."""
    for document in documents:
        size -= len(document.data)
        if size < 0:
            return
        yield document.data


def choose(read: dict[str, list[Document]], seed: int) -> tuple[list[bytes], list[bytes]]:
    """Returns the documents of both sides, training first: none repeated, shuffled, cut."""

    def shuffled(names: set[str]) -> list[Document]:
        joined = [document for name in sorted(names) for document in read[name]]
        return sorted(joined, key=lambda document: order_of(document.name, seed))

    held_out = shuffled(set(VALIDATION))
    trained = shuffled(set(read) - VALIDATION)
    new = without_repeated([*held_out, *trained])
    names = {document.name for document in held_out}
    validation = [document for document in new if document.name in names]
    train = [document for document in new if document.name not in names]
    for side, before, after in (("validation", held_out, validation), ("train", trained, train)):
        sizes = [sum(len(d.data) for d in documents) / 1e6 for documents in (before, after)]
        print(
            f"{side}: {len(before)} documents, {sizes[0]:.1f} MB; "
            f"without repeated ones {len(after)}, {sizes[1]:.1f} MB"
        )
    return list(cut(train, TRAIN_BYTES)), list(cut(validation, VALIDATION_BYTES))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=timing.ROOT / "build" / "parity")
    parser.add_argument("--seed", type=int, default=1, help="of the shuffle (%(default)s)")
    arguments = parser.parse_args()
    packages = download(arguments.out.resolve() / "downloads")  # apt-get runs in other folders
    train, validation = choose(read_packages(packages, arguments.seed), arguments.seed)
    folder = arguments.out / "text"
    print(f"sha256 of the text: {write_text_parts(folder, train, validation)}; in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
