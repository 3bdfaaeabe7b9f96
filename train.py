"""
Trains the small model of this repository on the documentation inside Python: about eight minutes on two cores.

    python train.py                       # writes out/: ranks file, prompts, weights
    python generate_naive.py --model out

Nothing is downloaded. The tokenizer, 4 layers of 4 heads and the held-out prompts are all made here;
what is committed in toolbox/builtin is such a run. Interrupt it at will: the state is saved twice a
minute, and the same command goes on where it stopped, with the same result as an uninterrupted run.

The text that it learns to write is English-like, not sensible. It is here to be batched.
"""
import argparse
import math
import os
import pickle
import random
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from model import GPT, GPTConfig
from toolbox.cli import guarded
from toolbox.corpus import documents
from toolbox.tokenizer import from_ranks, train_ranks, write_ranks_file
from toolbox.weights import write_gpt2

N_TOKENS = 1023         # of the tokenizer, <|endoftext|> comes on top
SAVE_EVERY = 30         # seconds
LOG_EVERY = 50          # steps
VALIDATE_EVERY = 500    # steps


def split(documents, seed=0):
    """Shuffles the documents and holds out one in twenty."""
    documents = list(documents)
    random.Random(seed).shuffle(documents)
    n = len(documents) // 20
    return documents[n:], documents[:n]


def pick_prompts(held_out, encoding, lengths=(5, 6, 7, 9, 12, 16, 22, 31, 45, 64, 90, 130)):
    """
    Held-out documents cut off at varied lengths in tokens: the short ones are a title and the start
    of its text, the long ones most of a text. One paragraph each, no blank lines, so that a plain text
    file can hold them.
    """
    prompts = []
    paragraphs = [(title, " ".join(body.split("\n\n")[0].split())) for title, body in held_out]
    for title, text in paragraphs:
        if len(prompts) == len(lengths):
            break
        head, words = f"# {title}\n", text.split(" ")
        target = lengths[len(prompts)]
        # the first paragraph that can reach this length, but leaves something to say
        for n in range(1, len(words)):
            prompt = head + " ".join(words[:n])
            if len(encoding.encode(prompt)) >= target:
                if len(encoding.encode(prompt)) <= target + 3 and text.isascii() and not set("`[") & set(prompt):
                    prompts.append(prompt)
                break
    random.Random(1).shuffle(prompts)   # long and short mixed, as requests come
    return prompts


def get_batch(docs, step, batch_size, block_size, seed):
    """
    (x, y) of shape (B, T). Each row is a run of random documents, and starts where a document starts,
    as every prompt will. A function of (seed, step), so that a resumed run sees the same data.
    """
    rng = random.Random(f"{seed} {step}")
    rows = []
    for _ in range(batch_size):
        row = []
        while len(row) < block_size + 1:
            row += rng.choice(docs)
        rows.append(row[:block_size + 1])
    tokens = torch.tensor(rows)
    return tokens[:, :-1], tokens[:, 1:]


def attend(layer, q, k, v):
    """The same causal attention as model.causal, through torch's fused kernel: training wants its backward pass."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def loss_of(model, x, y):
    """Mean cross-entropy in nats per token."""
    return F.cross_entropy(model(x, attend=attend).flatten(0, 1), y.flatten())


@torch.no_grad()
def validate(model, docs, args):
    batches = [get_batch(docs, step, 8, model.config.block_size, "validation") for step in range(20)]
    return sum(loss_of(model, x, y).item() for x, y in batches) / len(batches)


def learning_rate(step, args):
    warmup = min(100, args.steps // 10 + 1)
    if step < warmup:
        return args.lr * (step + 1) / warmup
    return args.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (args.steps - warmup)))


def train(args):
    for name in "steps", "batch_size", "lr":
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name} must be above 0, not {getattr(args, name)}")
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "train_state.pt.new").write_bytes(b"")   # can anything be written there?
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}") from None

    # 1. text and tokenizer
    train_texts, held_out = split(documents())
    texts = [f"# {title}\n{body}" for title, body in train_texts]
    ranks = train_ranks(texts, N_TOKENS)
    encoding = from_ranks(ranks, "builtin")
    write_ranks_file(ranks, out / "ranks.tiktoken")
    (out / "prompts.txt").write_text("\n\n".join(pick_prompts(held_out, encoding)) + "\n", encoding="utf-8")
    docs = [tokens + [encoding.eot_token] for tokens in encoding.encode_ordinary_batch(texts)]
    val = [tokens + [encoding.eot_token] for tokens in
           encoding.encode_ordinary_batch([f"# {title}\n{body}" for title, body in held_out])]
    bytes_per_token = sum(len(text.encode()) for text in texts) / sum(map(len, docs))
    print(f"{len(docs)} documents of {sum(map(len, docs)):,} tokens, {len(val)} held out")

    # 2. model and optimizer; weight decay for matrices only
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(block_size=256, vocab_size=encoding.n_vocab, n_layer=4, n_head=4, n_embd=128))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=args.lr, betas=(0.9, 0.99))

    # 3. go on where an interrupted run of the same settings stopped
    state_file, first = out / "train_state.pt", 0
    settings = {"steps": args.steps, "lr": args.lr, "seed": args.seed, "batch_size": args.batch_size,
                "train_tokens": sum(map(len, docs))}   # another Python has another text
    if state_file.exists():
        try:
            state = torch.load(state_file, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError):
            raise ValueError(f"{state_file} cannot be read: delete it to start from the beginning") from None
        if state["settings"] == settings:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first = state["step"]
            print(f"going on at step {first}")

    def save(step):
        torch.save({"settings": settings, "step": step, "model": model.state_dict(),
                    "optimizer": optimizer.state_dict()}, str(state_file) + ".new")
        os.replace(str(state_file) + ".new", state_file)   # whole or not at all

    # 4. train
    started = saved = time.perf_counter()
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = loss_of(model, *get_batch(docs, step, args.batch_size, model.config.block_size, args.seed))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        now, done = time.perf_counter(), step + 1
        if now - saved > SAVE_EVERY:
            save(done)
            saved = now
        if done % LOG_EVERY == 0 or done == args.steps:
            rate = (done - first) / (now - started)
            left = (args.steps - done) / rate
            print(f"step {done:5d}/{args.steps}  loss {loss.item():.3f}  {rate * args.batch_size * model.config.block_size:,.0f}"
                  f" tokens/s  {left // 60:.0f}:{left % 60:02.0f} left", flush=True)
        if done % VALIDATE_EVERY == 0 or done == args.steps:
            nats = validate(model, val, args)
            print(f"validation loss {nats:.3f} ({nats / math.log(2) / bytes_per_token:.2f} bits per byte)", flush=True)

    # 5. the result, which GPT.from_pretrained reads
    write_gpt2(model, out)
    state_file.unlink(missing_ok=True)
    Path(str(state_file) + ".new").unlink(missing_ok=True)
    print(f"wrote {out}: try  python generate_naive.py --model {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out", help="folder for the result and the saved state")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(guarded(parser.prog, lambda: train(arguments)))
