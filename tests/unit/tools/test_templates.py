"""The templates for clusters start what exists, with options that torchrun and the script know."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace

import yaml
from torch.distributed.run import get_args_parser

from tests.processes import REPOSITORY, run
from translation.arguments import ArgumentParser, Seq2SeqTrainingArguments
from translation.options import APPLICATION, DataTrainingArguments, ModelArguments

LAUNCHING = (REPOSITORY / "docs" / "launching.md").read_text(encoding="utf-8")


def torchrun(words: list[str]) -> Namespace:
    """What torchrun reads from a command of a template, with numbers for the variables."""
    assert words[:3] == ["zero", "run", "torchrun"]
    return get_args_parser().parse_args(
        [re.sub(r"\$[({]?\w+[)}]?", "1", word) for word in words[3:]]
    )


def test_kubernetes():
    service, job = yaml.safe_load_all(
        (REPOSITORY / "examples" / "kubernetes.yaml").read_text(encoding="utf-8")
    )
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    command = torchrun([*container["command"], *container["args"]])
    assert [variable["name"] for variable in container["env"]] == ["NODE_RANK"]
    assert "--node_rank=$(NODE_RANK)" in container["args"] and spec["completionMode"] == "Indexed"
    assert int(command.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(command.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    # Kubernetes names the pods of an indexed job so, if there is a headless service of their
    # subdomain.
    assert command.master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert (
        pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    )
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert command.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert (REPOSITORY / command.training_script).is_file()
    parser = ArgumentParser(
        APPLICATION, ModelArguments, DataTrainingArguments, Seq2SeqTrainingArguments
    )
    given = parser.parse_args(command.training_script_args)
    assert (REPOSITORY / given.deepspeed).is_file() and given.output_dir.startswith("/shared")


def test_slurm(tmp_path):
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", LAUNCHING, flags=re.DOTALL)
    (tmp_path / "job.sh").write_text(script)
    assert run(["bash", "-n", tmp_path / "job.sh"], timeout=10).returncode == 0
    (line,) = re.findall(r"^srun (.*)$", script.replace("\\\n", " "), flags=re.MULTILINE)
    command = torchrun(shlex.split(line))
    assert command.rdzv_backend == "c10d" and command.rdzv_endpoint == "1:29500"
    assert f"--gpus-per-node={command.nproc_per_node}" in script and "--ntasks-per-node=1" in script
    (seconds,) = re.findall(r"--signal=TERM@(\d+)", script)
    assert command.shutdown_timeout < int(seconds)
