"""The templates for clusters start what exists, with options that torchrun and the script know."""

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
    given = [re.sub(r"\$[({]?\w+[)}]?", "1", word) for word in words[3:]]
    return get_args_parser().parse_args(given)


def test_kubernetes():
    text = (REPOSITORY / "examples" / "kubernetes.yaml").read_text(encoding="utf-8")
    service, job = yaml.safe_load_all(text)
    spec, name = job["spec"], service["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    command = torchrun([*container["command"], *container["args"]])
    assert [variable["name"] for variable in container["env"]] == ["NODE_RANK"]
    assert "--node_rank=$(NODE_RANK)" in container["args"] and spec["completionMode"] == "Indexed"
    assert int(command.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(command.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    # Kubernetes names the pods of an indexed job so, if there is a headless service of their
    # subdomain.
    assert command.master_addr == f"{job['metadata']['name']}-0.{name}"
    assert pod["subdomain"] == name and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert command.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    mounted, volumes = container["volumeMounts"], pod["volumes"]
    assert {mount["name"] for mount in mounted} == {volume["name"] for volume in volumes}
    assert (REPOSITORY / command.training_script).is_file()
    kinds = ModelArguments, DataTrainingArguments, Seq2SeqTrainingArguments
    given = ArgumentParser(APPLICATION, *kinds).parse_args(command.training_script_args)
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
