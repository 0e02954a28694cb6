"""Data, tensor and pipeline parallelism at once, in a loop of your own: train, save, resume, write
a model folder.

    torchrun --nproc_per_node 8 examples/three_d.py                      2 x 2 x 2
    torchrun --nproc_per_node 4 examples/three_d.py --tensor 1
        2 x 1 x 2: data and pipeline
    torchrun --nproc_per_node 2 examples/three_d.py --tensor 1 --resume
        goes on from there on other ranks
    zero consolidate output/three_d output/three_d/model                 one folder, for
    from_pretrained

A small Llama learns to write sequences of 12 symbols twice. Everything is made here, nothing is
downloaded."""

import argparse
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # for a checkout that is not installed
import zero
from zero.comm.world import init_distributed
from zero.parallel.pipeline import IGNORED, Pipeline, split

SYMBOLS, LENGTH, BATCH, MICRO_BATCHES = 16, 24, 64, 4
MODEL = {
    "vocab_size": SYMBOLS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels of the global batch `number`.

    The first half of a sequence is not to be learned.
    """
    generator = torch.Generator().manual_seed(1000 + number)
    ids = torch.randint(SYMBOLS, (BATCH, LENGTH // 2), generator=generator).repeat(1, 2)
    labels = ids.clone()
    labels[:, : LENGTH // 2] = IGNORED
    return ids, labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share each layer")
    parser.add_argument(
        "--pipeline", type=int, default=2, help="ranks that have some of the layers each"
    )
    parser.add_argument(
        "--stages-per-rank", type=int, default=1, help="more than 1: the interleaved schedule"
    )
    parser.add_argument("--stage", type=int, default=3, help="of ZeRO, over the rest of the ranks")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("output/three_d"))
    parser.add_argument(
        "--resume", action="store_true", help="resume from the last checkpoint in --output"
    )
    args = parser.parse_args()

    init_distributed()
    ranks, of_model = torch.distributed.get_world_size(), args.pipeline * args.tensor
    if ranks % of_model:
        raise SystemExit(
            f"--pipeline {args.pipeline} x --tensor {args.tensor} = {of_model} does not divide "
            f"{ranks} ranks"
        )
    data = ranks // of_model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(
        device, (args.pipeline, data, args.tensor), mesh_dim_names=("pp", "shard", "tp")
    )
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": args.stage},
    }
    torch.manual_seed(0)
    model = split(LlamaForCausalLM(LlamaConfig(**MODEL)), mesh, args.stages_per_rank)
    engine, *_ = zero.initialize(model=model, config=config, mesh=mesh)
    schedule = Schedule1F1B if args.stages_per_rank == 1 else ScheduleInterleaved1F1B
    pipeline = Pipeline(engine, mesh, LENGTH, schedule)
    say = print if engine.global_rank == 0 else lambda text: None
    here = sum(group.shard.numel() for group in engine.groups)
    say(
        f"{data} x {args.tensor} x {args.pipeline} ranks, each holds {here} elements of the "
        "parameters"
    )
    if args.resume:
        path, _ = engine.load_checkpoint(args.output)
        say(f"resumed from {path}")

    place = mesh.get_local_rank("shard")
    while engine.global_steps < args.steps:
        ids, labels = (rows.chunk(data)[place] for rows in batch(engine.global_steps))
        loss = pipeline.step(ids, labels)
        if engine.global_steps % args.save_every == 0:
            say(
                f"step {engine.global_steps}: loss {loss:.6f}, norm "
                f"{engine.get_global_grad_norm():.6f}"
            )
            engine.save_checkpoint(args.output)


if __name__ == "__main__":
    main()
