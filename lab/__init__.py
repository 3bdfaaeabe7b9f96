"""
Everything that runs, checks, shows, measures and serves the path. The path knows nothing of it.

    run.py          the command line of every stage: flags, inputs, run, check, report
    loading/        models, tokenizers and workloads by name; Llama
    checks/         is it right? Check, near-ties, X-ray, traps, toy model
    views/          what does it look like? Report, plots, progress
    compiled/       the compiled step: optimize(model)
    simulate/       a GPU, calculated
    explorer/       a page in which to step through a run, and to try one's own
    server/         an OpenAI-compatible server of the last stage, with its live page
    experiments/    measurements, benchmark, pictures, training
"""
