"""Measurements on this machine: forward time against rows, and time between tokens when a long prompt arrives."""
import statistics
import time
from dataclasses import replace

import torch

from scheduler import Request
from toolbox.stages import knobs_of


@torch.inference_mode()
def forward_times(model, rows=(1, 2, 4, 8, 16, 32, 64, 128, 256), repeats=7, seconds=8.0):
    """
    Median seconds of one forward pass over N tokens of N requests, no past, for each N: [(N, seconds), ...].
    What grows with N here is the arithmetic; the weights are read once, whatever N is. Stops after about `seconds`.
    """
    def attend(layer, q, k, v):
        return v   # each token sees itself alone, so that the layers' own cost shows

    points, started = [], time.perf_counter()
    for n in rows:
        tokens = torch.zeros(n, dtype=torch.long, device=model.device)
        taken = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            model(tokens, tokens, attend).flatten()[0].item()   # .item() waits for the device
            taken.append(time.perf_counter() - start)
        points.append((n, statistics.median(taken[1:])))        # the first one warms up
        if time.perf_counter() - started > seconds:
            break
    return points


def decode_gaps(model, stages, prompt_tokens, arrival=8, running=4, budget=64, repeats=3):
    """
    Some short requests decode, and at step `arrival` a long prompt comes in. For each of `stages`, {name:
    generate}: the time between tokens of those that decode, as [(step, seconds), ...], medians over repeats.
    """
    vocab = model.config.vocab_size
    short = [Request([(7 * i + j) % vocab for j in range(4)], arrival + 20, name=f"short{i}") for i in range(running)]
    long = Request([(11 * j) % vocab for j in range(prompt_tokens)], 8, name="long", arrival=arrival)
    gaps = {name: {} for name in stages}
    for repeat in range(repeats + 1):   # stages take turns, so that a slow moment of the machine hits all of them
        for name, generate in stages.items():
            requests = [replace(request) for request in [*short, long]]
            generate(model, requests, **knobs_of(generate, {"max_batch": running + 1, "token_budget": budget})[0])
            for request in requests[:-1]:
                for step, before, now in zip(request.token_steps[1:], request.token_times, request.token_times[1:]):
                    if repeat:          # the first one warms up
                        gaps[name].setdefault(step, []).append(now - before)
    return {name: sorted((step, statistics.median(values)) for step, values in steps.items()) for name, steps in gaps.items()}
