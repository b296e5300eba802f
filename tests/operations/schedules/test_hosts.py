"""The script for Slurm and the manifest for Kubernetes: what they start is a command that works."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kedro.framework.cli.project import run
from torch.distributed.run import get_args_parser

from tests.grpo.distributed.commands import free_port
from tests.small_project import ROOT, environment, small_project

SCRIPT, MANIFEST = ROOT / "schedules/hosts/train.sbatch", ROOT / "schedules/hosts/kubernetes.yaml"
SRUN = """#!/bin/bash
# Each node gets the command; the first failure ends all, as --kill-on-bad-exit does.
shift
echo "$@" >> calls
"$@" & one=$!
"$@" & other=$!
wait $one && wait $other
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node[0-1]" ] && printf '127.0.0.1\\nnode1\\n'
"""


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    return service, job


def test_the_pods_find_the_first_one_and_run_the_command() -> None:
    service, job = manifest()
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = get_args_parser().parse_args(container["command"][1:])
    assert given.rdzv_endpoint == f"{job['metadata']['name']}-0.{service['metadata']['name']}:29400"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["completionMode"] == "Indexed"
    assert int(given.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(given.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert given.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    assert (given.module, given.training_script) == (True, "kedro")
    word, *options = given.training_script_args
    assert word == "run"
    processes = int(given.nnodes) * int(given.nproc_per_node)
    asked = run.make_context("run", options).params["params"]
    assert asked == {"resume": "same", "grpo": {"prompts_per_step": processes}}, "a prompt for each process"
    assert {own["name"] for own in container["volumeMounts"]} == {own["name"] for own in pod["volumes"]}


def test_bash_and_shellcheck_accept_the_script() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SCRIPT], check=True)


def test_slurm_gives_time_before_torchrun_does() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert "--signal=TERM@900" in text
    assert "--shutdown-timeout=840" in text


@pytest.mark.slow
def test_the_scripts_own_lines_on_two_nodes(tmp_path: Path) -> None:
    """Its nodes are this machine twice."""
    project = small_project(tmp_path / "project")
    (project / "conf/glm_image/parameters.yml").write_text("{}\n")  # The defaults: the small model.
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (project / name).write_text(text)
        (project / name).chmod(0o755)
    script = project / "schedules/hosts/train.sbatch"
    script.write_text(script.read_text().replace(":29400", f":{free_port()}"))
    variables = environment(project)
    slurm = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]"}
    done = subprocess.run(
        ["bash", script],
        cwd=project,
        env=variables | slurm | {"PATH": f"{project}:{variables['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len((project / "calls").read_text().splitlines()) == 3
    assert done.stdout.count("Trained 2 steps") == 1
    assert (project / "data/08_reporting/evaluation/evaluation.html").is_file() or list(
        project.glob("data/**/evaluation.html")
    )
