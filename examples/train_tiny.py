"""Train `tiny-pydoc`, a 2.8 M parameter Llama that writes Python docstrings.

The text is the docstrings of the standard library of the interpreter that runs this script, so
nothing is downloaded. The result is a Hugging Face folder (weights in bfloat16, about 5.7 MB) with
a held-out text and its perplexity, which any other implementation of the model can be checked
against.

    OMP_NUM_THREADS=1 python examples/train_tiny.py --out examples/models/tiny-pydoc --steps 4500

makes the folder that lies in the repository, in about half an hour on one core; the same seed,
threads, machine and versions of Python and of the packages give the same weights again. Without
`--steps` the run takes `--minutes` (25 by default) plus less than a minute, and the number of steps
depends on the machine. The script needs torch, transformers, tokenizers and rich.
"""

import argparse
import ast
import copy
import hashlib
import json
import math
import platform
import random
import re
import shutil
import sysconfig
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
VOCAB_SIZE = 2048
CONTEXT = 256
WINDOW = CONTEXT - 1  # tokens of text in a window; <s> takes the first position

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "idlelib", "site-packages"}
SHORTEST_DOCUMENT = 20  # characters
VALIDATION_SHARE = 0.02  # chooses the weights that are kept
HELDOUT_SHARE = 0.05  # measured once, at the end
HELDOUT_TOKENS = 20_000

BATCH_SIZE = 4
PEAK_LR = 2e-3
FINAL_LR = 0.05  # as a share of the peak
WARMUP = 0.03  # as a share of the run
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.1
GRADIENT_NORM = 1.0
DROPOUT = 0.1
EVALUATIONS = 25

PROMPTS = ("Return a list of", "Raise ValueError if", "This module provides")
PERPLEXITY_DEFINITION = (
    "Encode heldout.txt with the tokenizer without adding special tokens (each </s> in the text is "
    f"one token), cut the ids into consecutive non-overlapping windows of {WINDOW} tokens and drop "
    "the last partial one, put <s> in front of each window, sum the negative log likelihood of "
    f"each of the {WINDOW} tokens given those before it in its window, and take exp of the mean "
    "over all tokens; bfloat16 weights, computed in float32."
)

console = Console()


@dataclass(frozen=True)
class Corpus:
    train: list[str]
    validation: list[str]
    heldout: list[str]


@dataclass(frozen=True)
class Outcome:
    """The result of a training run."""

    steps: int
    best_step: int
    epochs: float
    train_loss: float
    validation_loss: float
    minutes: float


def docstrings(root: Path) -> Iterator[str]:
    """Every docstring under `root`, in the order of the files' paths."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS & set(path.relative_to(root).parts):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, nodes) and (text := ast.get_docstring(node)):
                yield text


def clean(text: str) -> str:
    """`text` without doctest sessions, trailing spaces and runs of blank lines."""
    text = "\n".join(line.rstrip() for line in text.expandtabs().splitlines())
    text = re.sub(r"^ *>>>.*(?:\n.+)*\n?", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def is_usable(text: str) -> bool:
    return (
        len(text) >= SHORTEST_DOCUMENT
        and text.isascii()
        and not any(token in text for token in (BOS, EOS, PAD))
    )


def load_corpus(root: Path) -> Corpus:
    """Distinct cleaned docstrings, split by a hash of their text."""
    corpus = Corpus([], [], [])
    for text in dict.fromkeys(filter(is_usable, map(clean, docstrings(root)))):
        position = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) / 2**32
        if position < HELDOUT_SHARE:
            corpus.heldout.append(text)
        elif position < HELDOUT_SHARE + VALIDATION_SHARE:
            corpus.validation.append(text)
        else:
            corpus.train.append(text)
    return corpus


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer: any text comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, BOS_ID)],
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> list[list[int]]:
    encodings = tokenizer.encode_batch(documents, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def windows(ids: list[int]) -> torch.Tensor:
    """`ids` as rows of `<s>` and WINDOW tokens; the last partial row is dropped."""
    count = len(ids) // WINDOW
    rows = torch.tensor(ids[: count * WINDOW]).view(count, WINDOW)
    return nn.functional.pad(rows, (1, 0), value=BOS_ID)


def join(documents: list[list[int]]) -> list[int]:
    return [token for document in documents for token in (*document, EOS_ID)]


def batches(documents: list[list[int]], seed: int) -> Iterator[torch.Tensor]:
    """Batches without end; the documents are joined in a new order in every epoch."""
    order = random.Random(seed)
    while True:
        rows = windows(join(order.sample(documents, len(documents))))
        yield from rows[order.sample(range(len(rows)), len(rows))].split(BATCH_SIZE)


def heldout_text(tokenizer: Tokenizer, documents: list[str]) -> str:
    """The first documents that have at most HELDOUT_TOKENS tokens, joined with `</s>`."""
    kept, total = [], 0
    for text, ids in zip(documents, encode(tokenizer, documents), strict=True):
        total += len(ids) + 1
        if total > HELDOUT_TOKENS:
            break
        kept.append(text)
    return EOS.join(kept)


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return LlamaForCausalLM(config)


def add_dropout(model: LlamaForCausalLM) -> None:
    """Drop parts of what each block adds to the residual stream, in training mode only."""

    def drop(module: nn.Module, _inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(output, DROPOUT, module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=BETAS, fused=True)


def learning_rate(done: float) -> float:
    """A linear warmup, then a cosine; `done` is the share of the run that is over."""
    if done < WARMUP:
        return PEAK_LR * done / WARMUP
    cosine = 0.5 * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP)))
    return PEAK_LR * (FINAL_LR + (1 - FINAL_LR) * cosine)


@torch.inference_mode()
def mean_loss(model: nn.Module, rows: torch.Tensor) -> float:
    """Mean negative log likelihood of a token, in evaluation mode."""
    training = model.training
    model.eval()
    total = 0.0
    for batch in rows.split(BATCH_SIZE):
        logits = model(input_ids=batch).logits[:, :-1].float()
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
        )
        total += loss.item()
    model.train(training)
    return total / (len(rows) * WINDOW)


def progress_bar() -> Progress:
    return Progress(
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tok/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def fit(
    model: LlamaForCausalLM,
    documents: list[list[int]],
    validation: torch.Tensor,
    *,
    minutes: float,
    steps: int | None,
    seed: int,
) -> Outcome:
    """Train for `steps`, or else for `minutes`, and leave the best validated weights in `model`."""
    optimizer = build_optimizer(model)
    epoch = len(join(documents))
    sample = windows(join(documents))[:: max(1, epoch // WINDOW // len(validation))]
    best = (math.inf, math.inf, 0, copy.deepcopy(model.state_dict()))
    average, seen, step, done, next_evaluation = math.log(VOCAB_SIZE), 0, 0, 0.0, 1
    start = time.monotonic()
    model.train()
    with progress_bar() as progress:
        task = progress.add_task("training", total=1.0, loss=average, speed=0.0)
        for batch in batches(documents, seed):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(done)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
            optimizer.step()
            optimizer.zero_grad()

            step += 1
            seen += batch[:, 1:].numel()
            average += 0.02 * (loss.item() - average)
            elapsed = time.monotonic() - start
            done = min(1.0, step / steps if steps else elapsed / (60 * minutes))
            progress.update(task, completed=done, loss=average, speed=seen / elapsed)
            if done >= next_evaluation / EVALUATIONS:
                next_evaluation = math.floor(done * EVALUATIONS) + 1
                validated, trained = mean_loss(model, validation), mean_loss(model, sample)
                progress.console.print(
                    f"step {step:5d}, epoch {seen / epoch:5.2f}: "
                    f"train {trained:.3f}, validation {validated:.3f}"
                )
                if validated < best[0]:
                    best = (validated, trained, step, copy.deepcopy(model.state_dict()))
            if done >= 1.0:
                break
    validated, trained, best_step, state = best
    model.load_state_dict(state)
    elapsed = (time.monotonic() - start) / 60
    return Outcome(step, best_step, seen / epoch, trained, validated, elapsed)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(out)


def measure_heldout(out: Path) -> dict[str, float | int | str]:
    """The perplexity of `heldout.txt`, from the files in `out` alone."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    text = (out / "heldout.txt").read_text(encoding="utf-8")
    rows = windows(tokenizer.encode(text, add_special_tokens=False))
    return {
        "perplexity": math.exp(mean_loss(model, rows)),
        "tokens": len(rows) * WINDOW,
        "window": CONTEXT,
        "definition": PERPLEXITY_DEFINITION,
    }


def samples(out: Path, seed: int) -> list[tuple[str, str]]:
    """A greedy and a sampled continuation of each prompt, from the files in `out`."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 0}
    ways = {"greedy": {"do_sample": False}, "temperature 0.7": sampling}
    found = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        for name, options in ways.items():
            ids = model.generate(**inputs, max_new_tokens=80, **options)
            found.append((name, tokenizer.decode(ids[0], skip_special_tokens=True)))
    return found


def model_card(
    model: LlamaForCausalLM,
    heldout: dict[str, float | int | str],
    outcome: Outcome,
    train_tokens: int,
    settings: argparse.Namespace,
    texts: list[tuple[str, str]],
) -> str:
    """README.md of the folder; every figure in it comes from this run."""
    config = model.config
    budget = f"--steps {settings.steps}" if settings.steps else f"--minutes {settings.minutes:g}"
    shown = "\n\n".join(f"{name}:\n\n```text\n{text}\n```" for name, text in texts)
    return f"""# tiny-pydoc

A Llama of {model.num_parameters() / 1e6:.2f} M parameters that writes text in the style of Python
docstrings. It is small enough for a repository, and its weights are trained, so a defect in a
kernel shows in its perplexity and its text. Its statements about Python are often wrong.

## Architecture

`LlamaForCausalLM`, weights in bfloat16, tied embeddings.

| | |
|---|---|
| layers | {config.num_hidden_layers} |
| hidden size | {config.hidden_size} |
| heads | {config.num_attention_heads}, and {config.num_key_value_heads} for keys and values |
| head dimension | {config.head_dim} |
| feed-forward size | {config.intermediate_size} |
| context | {CONTEXT} |
| tokens | {config.vocab_size}, byte-level BPE; `<s>` starts a sequence, `</s>` ends a document |

## Data

The docstrings of the standard library of Python {platform.python_version()}, excluding its tests,
idlelib and installed packages. Doctest sessions are removed. Docstrings that are not
ASCII, shorter than {SHORTEST_DOCUMENT} characters, or exact duplicates are excluded.
{train_tokens:,} tokens are for training. A hash of each docstring's text assigns
{HELDOUT_SHARE:.0%} of them to the held-out set and {VALIDATION_SHARE:.0%} to the validation set.
Docstrings of one module resemble each other, so the held-out text is close to the training text.

The text is copyright the Python Software Foundation and is used under its license agreement
(`LICENSE-PSF.txt`), `heldout.txt` included; a few modules of the standard library carry permissive
notices of their own.

## Results

| | |
|---|---|
| held-out perplexity | {heldout["perplexity"]:.3f} over {heldout["tokens"]:,} tokens |
| held-out loss | {math.log(heldout["perplexity"]):.3f} |
| validation loss | {outcome.validation_loss:.3f} |
| training loss, without dropout | {outcome.train_loss:.3f} |
| steps | {outcome.steps:,}; the weights are those of step {outcome.best_step:,} |
| epochs | {outcome.epochs:.1f} |
| wall time of training | {outcome.minutes:.1f} minutes on {settings.threads} CPU thread(s) |

The saved weights have the lowest validation loss. The held-out text was not used in training or in
that choice. Held-out results use the saved bfloat16 weights, computed in float32; other losses use
the float32 weights before they were saved. `heldout.json`
has the exact perplexity and its definition.

## Training

```sh
python examples/train_tiny.py --out examples/models/tiny-pydoc {budget} \\
    --seed {settings.seed} --threads {settings.threads}
```

torch {torch.__version__} in float32. AdamW: peak learning rate {PEAK_LR:g}, betas {BETAS},
weight decay {WEIGHT_DECAY:g}. Schedule: {WARMUP:.0%} warmup, cosine decay to {FINAL_LR:.0%} of the
peak. Batches: {BATCH_SIZE} windows of {CONTEXT} tokens. Dropout: {DROPOUT:g} on the output of each
block before the residual addition. Gradient norm clipped at {GRADIENT_NORM:g}.

## Samples

Computed in float32, as with `--dtype float32`:

{shown}
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train tiny-pydoc, a Llama of 2.8 M parameters.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=25.0, help="training time (default 25)")
    parser.add_argument("--steps", type=int, help="train for this many steps, not for --minutes")
    parser.add_argument("--seed", type=int, default=0, help="weights, order and samples")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    settings = parser.parse_args()
    if settings.minutes <= 0 or settings.threads < 1 or (settings.steps or 1) < 1:
        parser.error("--minutes, --steps and --threads must be positive")
    return settings


def main() -> None:
    settings = parse_arguments()
    out: Path = settings.out
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)

    stdlib = Path(sysconfig.get_paths()["stdlib"])
    corpus = load_corpus(stdlib)
    tokenizer = train_tokenizer(corpus.train)
    train = encode(tokenizer, corpus.train)
    validation = windows(join(encode(tokenizer, corpus.validation)))
    model = build_model()
    add_dropout(model)
    train_tokens = len(join(train))
    console.print(
        f"{model.num_parameters():,} parameters, {len(train):,} documents, "
        f"{train_tokens:,} tokens, {validation.numel():,} tokens of validation"
    )

    outcome = fit(
        model,
        train,
        validation,
        minutes=settings.minutes,
        steps=settings.steps,
        seed=settings.seed,
    )
    save(model, tokenizer, out)
    text = heldout_text(tokenizer, corpus.heldout)
    (out / "heldout.txt").write_text(text, encoding="utf-8", newline="\n")
    heldout = measure_heldout(out)
    (out / "heldout.json").write_text(json.dumps(heldout, indent=2) + "\n", encoding="utf-8")
    if (license_file := stdlib / "LICENSE.txt").exists():
        shutil.copyfile(license_file, out / "LICENSE-PSF.txt")
    texts = samples(out, settings.seed)
    card = model_card(model, heldout, outcome, train_tokens, settings, texts)
    (out / "README.md").write_text(card, encoding="utf-8")
    for name, text in texts:
        console.rule(name)
        console.print(text, markup=False, highlight=False)
    console.print(f"{outcome}\nheld-out perplexity {heldout['perplexity']:.3f}, saved in {out}")


if __name__ == "__main__":
    main()
