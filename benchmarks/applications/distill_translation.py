"""From a translation T5 to one of a quarter of its size: BLEU of the teacher, and of students with
and without it.

    python -m benchmarks.applications.distill_translation --pairs 1000 --teacher-steps 600
    python -m benchmarks.applications.distill_translation --data FOLDER --length 40
        --pairs 2000 --student-steps 4000
        # FOLDER has en-de.train.jsonl, en-de.validation.jsonl and en-de.test.jsonl

`run_translation.py` trains the teacher on all pairs. Then `run_distill.py` trains three students
for each seed, for the same steps: from scratch, from the teacher's best layers, and from these
layers with the teacher's probabilities, which come from a cache. With `--pairs`, the students have
the targets of the first pairs only. The one with the teacher also has the teacher's translations of
all other sources (sequence-level distillation, arXiv 1606.07947). One process with one thread runs
at a time."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path

import torch

import run_distill
import run_translation
from benchmarks.runner import Parser, Table, finish
from examples.demonstration.cldr import build_corpus
from translation.model import BUILT_IN_CORPUS_SIZE, FREE_TEXT_SIZE, small_t5_config
from translation.tokenizer import scored_pieces, t5_tokenizer, train_sentencepiece
from zero.tools.arguments import count

SCRATCH, LAYERS, TEACHER = "from scratch", "from the teacher's layers", "with the teacher"
STUDENTS = (SCRATCH, LAYERS, TEACHER)
COMMON = """--save_strategy no --report_to none --disable_tqdm True --adam_beta2 0.99
 --warmup_steps 50 --per_device_eval_batch_size 128 --train_sampling_strategy group_by_length
 --ddp_find_unused_parameters False --do_predict --predict_with_generate True""".split()


def read_pairs(path: Path) -> list[tuple[str, str]]:
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(record["translation"]["en"], record["translation"]["de"]) for record in records]


def write_pairs(path: Path, pairs: Iterable[tuple[str, str]]) -> None:
    records = ({"translation": {"en": source, "de": target}} for source, target in pairs)
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text("".join(lines), encoding="utf-8")


def prepare(args: argparse.Namespace) -> dict[str, Path]:
    """Return the files of the splits. Write tokenizer and configurations of both models."""
    folder: Path = args.folder
    splits = ("train", "validation", "test")
    data = {split: (args.data or folder) / f"en-de.{split}.jsonl" for split in splits}
    if args.data is None:
        for split, pairs in build_corpus()._asdict().items():
            write_pairs(data[split], pairs)
    size = FREE_TEXT_SIZE if args.data else BUILT_IN_CORPUS_SIZE
    texts = (text for pair in read_pairs(data["train"]) for text in pair)
    pieces = train_sentencepiece(texts, args.vocabulary, size.character_coverage)
    tokenizer = t5_tokenizer(scored_pieces(pieces))
    for name in ("teacher", "student"):
        layers = getattr(args, f"{name}_layers")
        config = small_t5_config(tokenizer, size._replace(d_model=args.width, num_layers=layers))
        config.save_pretrained(folder / f"{name}_config")
        tokenizer.save_pretrained(folder / f"{name}_config")
    pairs = read_pairs(data["train"])
    write_pairs(folder / "pairs.jsonl", pairs[: args.pairs])
    write_pairs(folder / "others.jsonl", pairs[args.pairs :] if args.pairs else [])
    return data


def start(main: Callable[[], None], *options: object) -> None:
    """Run a script in a fork of this process, which has imported it."""
    sys.argv = [main.__module__, *map(str, options)]
    print(" ".join(sys.argv), file=sys.stderr, flush=True)
    process = get_context("fork").Process(target=main)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"exit code {process.exitcode}: {' '.join(sys.argv)}")


def run(main: Callable[[], None], output: Path, *options: object) -> tuple[float, float]:
    """Train or predict. Return the BLEU on the test file, and the CPU seconds."""
    result = output / "bleu.json"
    if not result.exists():
        before = os.times()
        start(main, "--output_dir", output, *COMMON, *options)
        after = os.times()
        seconds = after.children_user + after.children_system
        seconds -= before.children_user + before.children_system
        bleu = json.loads((output / "predict_results.json").read_text())["predict_bleu"]
        result.write_text(json.dumps([bleu, seconds]))
    bleu, seconds = json.loads(result.read_text())
    return bleu, seconds


def train_teacher(data: dict[str, Path], args: argparse.Namespace) -> None:
    """Train the teacher. Write what a student learns from it: `with_teacher.jsonl`, the pairs and
    its translations of the other sources, and `cache`, its probabilities of all these targets.
    """
    folder: Path = args.folder
    lengths = ("--max_source_length", args.length, "--max_target_length", args.length)
    common = ("--source_lang", "en", "--target_lang", "de", *lengths)
    bleu, seconds = run(
        run_translation.main, folder / "teacher", "--config_name", folder / "teacher_config",
        *common, "--do_train", "--train_file", data["train"], "--validation_file",
        data["validation"], "--test_file", data["test"], "--num_beams", 4, "--max_steps",
        args.teacher_steps, "--learning_rate", args.learning_rate,
        "--lr_scheduler_type", "cosine", "--per_device_train_batch_size", args.batch,
    )  # fmt: skip
    pairs, others = (read_pairs(folder / f"{name}.jsonl") for name in ("pairs", "others"))
    if others:
        run(
            run_translation.main, folder / "translated", "--model_name_or_path", folder / "teacher",
            *common, "--test_file", folder / "others.jsonl", "--num_beams", 1,
        )  # fmt: skip
        file = folder / "translated" / "generated_predictions.txt"
        targets = file.read_text(encoding="utf-8").splitlines()
        made = zip((source for source, _ in others), targets, strict=True)
        pairs += [pair for pair in made if pair[1]]
    write_pairs(folder / "with_teacher.jsonl", pairs)
    start(
        run_distill.main, "cache_teacher", *distilling(folder / "with_teacher.jsonl", args),
        "--teacher_cache", folder / "cache", "--top_k", 12,
    )  # fmt: skip
    (folder / "teacher.json").write_text(json.dumps({"bleu": bleu, "seconds": seconds}))


def distilling(train: Path, args: argparse.Namespace) -> list[object]:
    """Options that all calls of `run_distill.py` have."""
    return [
        "--teacher_model_name_or_path", args.folder / "teacher",
        "--tokenizer_name", args.folder / "teacher_config", "--train_file", train,
        "--source_column", "translation.en", "--target_column", "translation.de",
        "--max_length", args.length,
    ]  # fmt: skip


def train_student(name: str, seed: int, data: dict[str, Path], args: argparse.Namespace) -> float:
    """Train a student, and return its BLEU on the test sentences."""
    folder: Path = args.folder
    train = "with_teacher.jsonl" if name == TEACHER else "pairs.jsonl"
    options = distilling(folder / train, args)
    options += [
        "--do_train", "--test_file", data["test"], "--generation_max_length", args.length,
        "--generation_num_beams", 4, "--seed", seed, "--max_steps", args.student_steps,
        "--learning_rate", args.student_learning_rate, "--lr_scheduler_type", "cosine",
        "--per_device_train_batch_size", args.batch,
    ]  # fmt: skip
    if name == SCRATCH:
        options += ["--student_config", folder / "student_config"]
    else:
        options += ["--init_student_from_teacher", f"best:{args.student_layers}"]
    if name == TEACHER:
        options += ["--teacher_cache", folder / "cache", "--kd_alpha", 0.5]
    else:
        options += ["--kd_alpha", 0]
    output = folder / f"{STUDENTS.index(name)}_{seed}"
    bleu, seconds = run(run_distill.main, output, *options)
    print(f"{name}, seed {seed}: BLEU {bleu:.2f}, {seconds:.0f} CPU s", flush=True)
    return bleu


def parameters(folder: Path) -> int:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(folder)).num_parameters()


def measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    data = prepare(args)
    if not (args.folder / "teacher.json").exists():
        train_teacher(data, args)
    teacher = json.loads((args.folder / "teacher.json").read_text())
    sizes = [parameters(args.folder / f"{name}_config") for name in ("teacher", "student")]
    print(
        f"teacher: {sizes[0]:,} parameters, BLEU {teacher['bleu']:.2f}, "
        f"{teacher['seconds']:.0f} CPU s; "
        f"students: {sizes[1]:,} parameters ({sizes[1] / sizes[0]:.0%})",
        flush=True,
    )
    students = {
        name: [train_student(name, seed, data, args) for seed in range(args.seeds)]
        for name in STUDENTS
    }
    rows = [
        [name, *bleu, statistics.mean(bleu)]
        for name, bleu in {"teacher": [teacher["bleu"]] * args.seeds, **students}.items()
    ]
    columns = ["BLEU", *(f"seed {seed}" for seed in range(args.seeds)), "mean"]
    finish(args, Table("BLEU on the test file", columns, rows), teacher=teacher, parameters=sizes)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder with three splits; default: Babel's data")
    parser.add_argument("--vocabulary", type=count, default=2000)
    parser.add_argument("--width", type=count, default=128, help="d_model of both models")
    parser.add_argument("--teacher-layers", type=count, default=6)
    parser.add_argument("--student-layers", type=count, default=1)
    parser.add_argument("--teacher-steps", type=count, default=1600)
    parser.add_argument("--student-steps", type=count, default=1500)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--student-learning-rate", type=float, default=3e-3)
    parser.add_argument("--pairs", type=count, help="that the students have; default: all")
    parser.add_argument("--batch", type=count, default=64)
    parser.add_argument("--length", type=count, default=32, help="tokens of a sentence, at most")
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument(
        "--folder", type=Path, help="keeps the models, and has those of an earlier run"
    )
    parser.add_output()
    args = parser.parse_args()
    if args.folder:
        return measure(args)
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        measure(args)


if __name__ == "__main__":
    main()
