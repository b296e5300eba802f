"""The line for cron: what it calls, and that a real cron runs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.schedules.standin import PATH, SCHEDULES, StandIn, is_possible, run_apart
from visual_grpo.retraining.outcome import Code

LOG = "data/08_reporting/retraining.log"


def lines(project: StandIn, when: str) -> str:
    """The crontab as a user fills it in, with another time."""
    text = (SCHEDULES / "cron/crontab").read_text(encoding="utf-8").replace(PATH, str(project.folder))
    filled, times = re.subn(r"^17 3 \* \* 0 ", f"{when} ", text, flags=re.MULTILINE)
    assert times == 1
    return filled


def call(project: StandIn) -> subprocess.CompletedProcess[str]:
    """As cron does, whose environment has little."""
    command = lines(project, "").splitlines()[-1]
    env = {"PATH": "/usr/bin:/bin", "PROJECT": str(project.folder)}
    return subprocess.run(["/bin/sh", "-c", command], env=env, cwd="/", capture_output=True, text=True, check=False)


@pytest.mark.parametrize("code", [Code.DONE, Code.NOT_PROMOTED])
def test_nothing_is_mailed_of_what_is_no_failure(tmp_path: Path, code: Code) -> None:
    project = StandIn.make(tmp_path / "a project")
    project.ends_with(code)
    done = call(project)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    log = (project.folder / LOG).read_text().splitlines()
    assert log[1] == "said by the retraining"
    assert log[2].endswith(f"ended with exit code {int(code)}")
    assert project.calls() == [f"-m visual_grpo.retraining in {project.folder} with nothing"]


@pytest.mark.parametrize("code", sorted({*Code} - {Code.DONE, Code.NOT_PROMOTED}))
def test_a_failure_is_mailed_with_what_the_retraining_said(tmp_path: Path, code: int) -> None:
    project = StandIn.make(tmp_path)
    project.ends_with(code)
    said = call(project).stdout
    assert "said by the retraining" in said
    assert said.splitlines()[-1] == f"The retraining ended with exit code {code}."


def test_one_at_a_time(tmp_path: Path) -> None:
    project = StandIn.make(tmp_path)
    words = ["flock", str(tmp_path), "sh", "-c", "echo has it; cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        done = call(project)
        other.communicate()
    assert done.stdout == f"The retraining ended with exit code {int(Code.BUSY)}.\n"
    assert project.calls() == []


@pytest.mark.skipif(shutil.which("logrotate") is None, reason="needs logrotate")
def test_logrotate_accepts_its_rules(tmp_path: Path) -> None:
    (tmp_path / "data/08_reporting").mkdir(parents=True)
    (tmp_path / LOG).write_text("a line\n")
    rules = (SCHEDULES / "cron/logrotate").read_text(encoding="utf-8").replace(PATH, str(tmp_path))
    user = Path.home().owner()
    (tmp_path / "rules").write_text(re.sub(r"su you you", f"su {user} {user}", rules))
    (tmp_path / "rules").chmod(0o600)
    words = ["logrotate", "--force", f"--state={tmp_path}/state", str(tmp_path / "rules")]
    path = f"{os.environ['PATH']}:/usr/sbin"
    subprocess.run(words, check=True, env=os.environ | {"PATH": path})
    assert (tmp_path / f"{LOG}.1.gz").exists()


@pytest.mark.slow
@pytest.mark.skipif(not is_possible("cron", "crontab"), reason="needs root and cron")
def test_a_real_cron_runs_it_each_minute(tmp_path: Path) -> None:
    """The first time it trained and did not promote, the second time it failed; two minutes."""
    project = StandIn.make(tmp_path / "project")
    project.ends_with(Code.NOT_PROMOTED)
    (tmp_path / "crontab").write_text(lines(project, "* * * * *"))
    (tmp_path / "sbin").mkdir()
    (tmp_path / "sbin/sendmail").write_text(f"#!/bin/sh\ncat >> {tmp_path}/mail\n")
    (tmp_path / "sbin/sendmail").chmod(0o755)
    done = run_apart(
        "mount -t tmpfs tmpfs /run; mount -t tmpfs tmpfs /etc/cron.d; mount --bind /dev/null /etc/crontab\n"
        "mount -t tmpfs tmpfs /var/spool/cron; mkdir -m 1730 /var/spool/cron/crontabs\n"
        "chgrp crontab /var/spool/cron/crontabs\n"
        f"mount -t overlay overlay -o lowerdir={tmp_path}/sbin:/usr/sbin /usr/sbin\n"
        f"crontab {tmp_path}/crontab; cron -f &\n"
        f"ended() {{ grep -c 'ended with' {project.folder}/{LOG} 2> {tmp_path}/none; }}\n"
        'for second in {1..70}; do [ "$(ended)" = 1 ] && break; sleep 1; done\n'
        f"echo 1 > {project.folder}/code\n"
        'for second in {1..70}; do [ "$(ended)" = 2 ] && break; sleep 1; done; sleep 2\n'
    )
    log = (project.folder / LOG).read_text()
    assert re.findall(r"ended with exit code (\d+)", log) == ["3", "1"], done
    mail = (tmp_path / "mail").read_text()
    assert mail.count("Subject: ") == 1, "of the failure alone"
    assert "To: you@example.org" in mail
    assert "The retraining ended with exit code 1." in mail
