"""Parameters that nobody can mean."""

from __future__ import annotations

from pathlib import Path

from tests.fault_cases.fault import TRAIN, Edit, Fault


def local(text: str) -> Edit:
    """Lines more in conf/local/parameters.yml."""

    def edit(project: Path) -> None:
        with (project / "conf/local/parameters.yml").open("a", encoding="utf-8") as file:
            file.write(text)

    return edit


FAULTS = (
    Fault(what="A parameter is misspelt", run="--pipeline=train --params=grpo.stepz=3"),
    Fault(what="A section is misspelt in `conf/local/parameters.yml`", edit=local("grop: {steps: 3}\n"), run=TRAIN),
    Fault(what="`conf/local/parameters.yml` is no YAML", edit=local("grpo: [1\n"), run=TRAIN),
    Fault(what="A number is a word", run="--pipeline=train --params=grpo.steps=many"),
    Fault(what="A number is out of its range", run="--pipeline=train --params=data.eval_share=2"),
    Fault(what="A module is named that the model does not have", run="--pipeline=train --params=policy.train=vl"),
    Fault(what="An environment does not exist", run="--env=glm_imag"),
    Fault(what="A pipeline does not exist", run="--pipeline=trian"),
    Fault(what="A preset of rewards does not exist", run="--pipeline=train --params=reward=shape"),
    Fault(what="Pictures are to be drawn of no prompt", run="--pipeline=generate"),
    Fault(what="No folder is named whose pictures are to be scored", run="--pipeline=score"),
    Fault(what="An adapter to compare does not exist", run="--pipeline=compare --params=compare.first=nosuchrun"),
)
