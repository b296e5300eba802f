"""Fills .gpu/ with what a GPU machine without a package index needs beside this checkout (`make gpu-kit`).

That machine has Python 3.12 with torch and transformers; .gpu/wheels gets what it lacks, and transformers, diffusers
and peft as they are locked. .gpu/plans.json gets the plan of each model, which takes minutes and is kept until the
code or the configurations change.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree
from zipfile import ZIP_DEFLATED, ZipFile

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT))  # The small models are the tests'.

from cases import RELEASED, released  # noqa: E402
from models import plan_of  # noqa: E402
from recording import Machine  # noqa: E402

KIT = ROOT / ".gpu"
PIP = [str(ROOT / ".venv-tools/bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
MOST = 64
"""MiB that travel."""
TARGET = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux"}
CARRIED = (HERE / "carried.txt").read_text(encoding="utf-8").split()
LIBRARIES = ("_cpu.so", "_cuda130.so")
"""Of bitsandbytes, which has one for each version of CUDA; the rest take 40 MiB."""
SOURCE_ONLY = ["antlr4-python3-runtime"]
"""Published without a wheel."""


def main() -> None:
    KIT.mkdir(exist_ok=True)
    download_wheels(KIT / "wheels")
    write_plans(KIT / "plans.json")
    tree = [ROOT / name for name in git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()]
    carried = [file for name in ("wheels", "plans.json") for file in walked(KIT / name)]
    sizes = [sum(file.stat().st_size for file in files if file.is_file()) / 2**20 for files in (tree, carried)]
    print(f"To travel: the files of git, {sizes[0]:.1f} MiB, and .gpu, {sizes[1]:.1f} MiB, of at most {MOST} MiB.")
    if sum(sizes) > MOST:
        sys.exit("That is too much: remove large files that git does not ignore, or wheels that your machine has.")


def download_wheels(folder: Path) -> None:
    rmtree(folder, ignore_errors=True)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)] + [
        "manylinux2014_x86_64",
        "manylinux1_x86_64",
    ]
    versions = locked()
    target = ["--only-binary=:all:", "--implementation=cp", "--python-version=3.12"]
    target += [f"--platform={platform}" for platform in platforms]
    names, built = ([f"{name}=={versions[name]}" for name in group] for group in (CARRIED, SOURCE_ONLY))
    subprocess.run([*PIP, "download", "--no-deps", *target, f"--dest={folder}", *names], check=True)
    subprocess.run([*PIP, "wheel", "--no-deps", f"--wheel-dir={folder}", *built, str(ROOT)], check=True)
    # Kedro reads the entry points of an installed package; the code itself travels with git.
    leave_out(folder, "visual_grpo", lambda name: ".dist-info/" not in name)
    leave_out(folder, "mlflow", lambda name: name.startswith("mlflow/server/js/"))
    leave_out(folder, "bitsandbytes", lambda name: "/libbitsandbytes_" in name and not name.endswith(LIBRARIES))


def leave_out(folder: Path, package: str, unwanted: Callable[[str], bool]) -> None:
    """Removes the files with unwanted names from the package's wheel; pip installs it nevertheless."""
    [wheel] = folder.glob(f"{package}-*.whl")
    thin = wheel.with_suffix(".thin")
    with ZipFile(wheel) as whole, ZipFile(thin, "w", ZIP_DEFLATED) as kept:
        for name in whole.namelist():
            if not unwanted(name):
                kept.writestr(name, whole.read(name))
    thin.replace(wheel)


def locked() -> dict[str, str]:
    """The versions of the locks on the machine, by name."""
    locks = ("requirements.lock", "quantised.lock")
    lines = [line for lock in locks for line in (ROOT / lock).read_text(encoding="utf-8").splitlines()]
    found = [Requirement(line.rstrip(" \\")) for line in lines if line[:1].isalnum()]
    return {each.name: str(each.specifier)[2:] for each in found if not each.marker or each.marker.evaluate(TARGET)}


def write_plans(file: Path) -> None:
    of = hashlib.sha256((git("rev-parse", "HEAD:src", "HEAD:conf") + git("diff", "HEAD", "src", "conf")).encode())
    if file.is_file() and json.loads(file.read_text(encoding="utf-8"))["of"] == of.hexdigest():
        return
    machine = Machine(device="cuda", tiny=False, work=KIT, out=KIT, until=math.inf, plans={}, card={})
    plans = {}
    for name in RELEASED:
        print(f"Planning {name}", flush=True)
        plans[name] = plan_of(released(name, machine))
    file.write_text(json.dumps({"of": of.hexdigest(), "plans": plans}, indent=1), encoding="utf-8")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def walked(path: Path) -> Iterator[Path]:
    yield from path.rglob("*") if path.is_dir() else [path]


if __name__ == "__main__":
    main()
